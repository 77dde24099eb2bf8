"""Thorough tests run when what they watch has changed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import watched

from forge_testing.suites.optimizer import OptimizerSuite

PROJECT = '[project]\nname = "{}"\ndependencies = {}\n[project.optional-dependencies]\nextra = {}\ntest = {}\n'
PARITY = "tests/parity"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in which a requires b, its extra requires c, and its tests d; all have passed."""
    monkeypatch.delenv(watched.ALL, raising=False)
    monkeypatch.setattr(watched, "ROOT", tmp_path)
    monkeypatch.setattr(watched, "RECORD", tmp_path / "watched.sha256")
    monkeypatch.setattr(watched, "_required", watched._required.__wrapped__)
    monkeypatch.setattr(watched, "_requires_itself", watched._requires_itself.__wrapped__)
    monkeypatch.setattr(watched, "_content", watched._content.__wrapped__)
    requirements = {
        "a": (["forge-plugin-b>=0.2", "numpy"], ["forge-plugin-c"], ["forge-plugin-d[extra]"]),
        "b": ([], [], []),
        "c": ([], [], []),
        "d": ([], ["forge-plugin-e"], ["forge-plugin-f"]),
        "e": ([], [], []),
        "f": ([], [], []),
    }
    for name, lists in requirements.items():
        folder = tmp_path / f"plugins/forge-plugin-{name}"
        folder.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(PROJECT.format(folder.name, *lists))
        (folder / "code.py").write_text("x = 1\n")
    for everywhere in watched.EVERYWHERE:
        (tmp_path / everywhere).mkdir(parents=True)
    (tmp_path / "tests/parity").mkdir(parents=True)
    (tmp_path / "tests/parity/test_it.py").write_text("")
    (tmp_path / "forge_core/step.py").write_text("")
    assert watched.record(watched.digests())
    assert not to_test()
    return tmp_path


def to_test() -> list[str]:
    return [folder.removeprefix("plugins/forge-plugin-") for folder in watched.changed(watched.digests())]


def test_a_change_is_tested_in_its_folder_in_all_that_require_it_and_in_folders_of_tests(place):
    def change(name: str) -> list[str]:
        path = place / f"plugins/forge-plugin-{name}/code.py"
        path.write_text("x = 2\n")
        found = to_test()
        path.write_text("x = 1\n")
        return found

    found = {name: change(name) for name in "abcdef"}
    # Not c, which only an extra requires that a's tests do not ask for, nor f, as tests of d are none of a's.
    assert found == {
        "a": ["a", PARITY],
        "b": ["a", "b", PARITY],
        "c": ["c", PARITY],
        "d": ["a", "d", PARITY],
        "e": ["a", "e", PARITY],
        "f": ["d", "f", PARITY],
    }


def test_tests_are_watched_by_their_own_folder_alone(place):
    folder = place / "plugins/forge-plugin-b/tests"
    folder.mkdir()
    (folder / "test_it.py").write_text("")
    assert to_test() == ["b"]
    (place / "tests/parity/test_it.py").write_text("x = 1\n")
    assert to_test() == ["b", PARITY]


def test_a_change_of_the_core_is_tested_everywhere(place):
    (place / "forge_core/step.py").write_text("x = 1\n")
    folders = [*"abcdef", PARITY]
    assert sorted(to_test()) == sorted(folders)


def test_another_comment_or_docstring_is_no_change(place):
    path = place / "plugins/forge-plugin-a/code.py"
    path.write_text('"""Sizes."""\n\n# the size\nx = 1  # in bytes\n"""In bytes."""\n')
    assert not to_test()
    path.write_text('"""Sizes."""\n\nx = "in bytes"\n')
    assert to_test() == ["a", PARITY]


def test_a_new_a_removed_and_a_renamed_file_and_a_table_are_noticed(place):
    folder = place / "plugins/forge-plugin-a"
    (folder / "new.py").write_text("")
    assert to_test() == ["a", PARITY]
    (folder / "new.py").unlink()
    assert not to_test()
    (folder / "code.py").rename(folder / "other.py")
    assert to_test() == ["a", PARITY]
    (folder / "other.py").rename(folder / "code.py")
    (folder / "README.md").write_text("")
    assert not to_test()
    (folder / "schema.json").write_text("")
    assert to_test() == ["a", PARITY]


def test_another_torch_and_a_missing_record_are_noticed(place, monkeypatch: pytest.MonkeyPatch):
    everything = list(watched.digests())
    with monkeypatch.context() as patch:
        patch.setattr(watched.metadata, "version", lambda name: "99.0")
        assert watched.changed(watched.digests()) == everything
        assert not watched.record(watched.digests()), "the record is of the versions that CI has"
    assert not to_test()
    watched.RECORD.unlink()
    assert watched.changed(watched.digests()) == everything


def test_what_has_passed_is_written_once(place):
    (place / "plugins/forge-plugin-a/code.py").write_text("x = 2\n")
    now = watched.digests()
    assert watched.record(now)
    assert not to_test()
    assert not watched.record(now)


def test_the_environment_asks_for_all(place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(watched.ALL, "all")
    assert watched.changed(watched.digests()) == list(watched.digests())


def test_every_thorough_file_exists():
    assert [name for name in sorted(watched.FILES) if not (watched.ROOT / name).is_file()] == []


class Collected:
    """Stands in for a test that was collected."""

    def __init__(self, path: Path, function: object, *marks: str) -> None:
        self.path, self.function, self.marks = path, function, marks
        self.added: list[str] = []

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.added.append(mark.name)


@pytest.fixture
def hooks(pytestconfig: pytest.Config) -> ModuleType:
    """The conftest.py of the repository."""
    plugins = pytestconfig.pluginmanager.get_plugins()
    [found] = [each for each in plugins if getattr(each, "__file__", None) == str(watched.ROOT / "conftest.py")]
    return found


def test_inherited_checks_marked_tests_and_listed_files_of_unchanged_folders_are_skipped(hooks):
    folder, other = watched.ROOT / "plugins/forge-plugin-lion/tests", watched.ROOT / "plugins/forge-plugin-rex/tests"
    listed = watched.ROOT / min(name for name in watched.FILES if "forge-plugin-lion" not in name)
    inherited = OptimizerSuite.test_it_descends_a_language_model
    tests = [
        Collected(folder / "test_x.py", to_test),
        Collected(folder / "test_x.py", inherited),
        Collected(folder / "test_x.py", to_test, "thorough"),
        Collected(listed, to_test),
        Collected(other / "test_x.py", inherited),
        Collected(watched.ROOT / "tests/test_x.py", inherited),
    ]
    unchanged = ["plugins/forge-plugin-lion", watched.folder_of(listed)]
    hooks.pytest_collection_modifyitems(SimpleNamespace(workerinput={hooks.GIVEN: unchanged}), list(tests))
    # A folder without a digest, such as `tests` itself, always runs
    assert [test.added for test in tests] == [[], ["skip"], ["skip"], ["skip"], [], []]


@pytest.mark.parametrize(
    ("where", "options", "code", "recorded"),
    [
        ("TESTPATHS", {}, 0, True),
        ("ARGS", {}, 0, False),
        ("TESTPATHS", {"keyword": "muon"}, 0, False),
        ("TESTPATHS", {}, 1, False),
    ],
)
def test_only_a_whole_run_that_passes_is_recorded(hooks, place, where, options, code, recorded):
    (place / "plugins/forge-plugin-a/code.py").write_text("x = 2\n")
    source = pytest.Config.ArgsSource[where]
    config = SimpleNamespace(args_source=source, getoption=options.get, stash={hooks.DIGESTS: watched.digests()})
    hooks.pytest_sessionfinish(SimpleNamespace(config=config), code)
    assert bool(to_test()) != recorded
