"""The figures of the house stay within their limits, and are counted right."""

from __future__ import annotations

from collections.abc import Iterator

import measure
import pytest
from plain_words import Prose, strings
from public_names import contract_names, imported, is_contract, is_public

from forge_kit.tools.forks import collector_paused


@pytest.fixture(scope="module", autouse=True)
def syntax_trees() -> Iterator[None]:
    """They stay for all tests, so that collections of garbage, a quarter of the time, would free none of them."""
    with collector_paused():
        yield


@pytest.mark.parametrize("name", measure.LIMITS)
def test_a_figure_is_within_its_limit(name: str) -> None:
    value, limit = measure.figures()[name], measure.LIMITS[name]
    assert limit.goal <= limit.now
    assert value <= limit.now, "\n".join([name, *measure.details().get(name, [])])


def test_the_closure_follows_imports_inside_of_functions_and_names_in_strings() -> None:
    assert "forge_core.engine.trainer" in measure.imports("forge_core")  # a string of `_HOMES`
    assert "forge_core.engine.trainer" in measure.imports("forge_core.cli.run")  # inside of a function
    assert "forge_core.job" not in measure.imports("forge_core.contracts.components")  # for type checkers


def test_a_module_that_nothing_imports_is_found(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = measure.unreached()
    (tmp_path / "alone.py").write_text("import forge_core.engine.trainer\n")
    known = {**measure.core_modules(), "forge_core.alone": tmp_path / "alone.py"}
    monkeypatch.setattr(measure, "core_modules", lambda: known)
    assert sorted(set(measure.unreached()) - set(before)) == ["forge_core.alone"]


def test_an_import_upwards_is_found_even_for_type_checkers(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "low.py"
    path.write_text("if TYPE_CHECKING:\n    from forge_core.engine.trainer import Trainer\n")
    known = {**measure.core_modules(), "forge_core.launch.low": path}
    monkeypatch.setattr(measure, "core_modules", lambda: known)
    assert "forge_core.launch.low -> forge_core.engine.trainer" in measure.imports_upwards()


def test_public_names_are_those_of_the_reference() -> None:
    assert is_public("forge_core", "load_job")
    assert is_public("forge_core.contracts.components", "OptimizerComponent")
    assert not is_public("forge_core.engine.loop", "Loop")
    assert is_contract("forge_core.contracts.components", "OptimizerComponent")
    assert is_public("forge_core.parallel.mesh", "local_part"), "documented"
    assert not is_contract("forge_core.parallel.mesh", "local_part")
    assert {"Trainer", "load_job", "OptimizerComponent", "Problem"} <= contract_names(measure.CORE)
    assert "local_part" not in contract_names(measure.CORE)
    assert list(imported("from forge_core.engine.loop import Loop\nimport forge_core.engine.step")) == [
        ("forge_core.engine.loop", "Loop"),
        ("forge_core.engine", "step"),
    ]


def test_statements_are_measured_without_their_surroundings(tmp_path) -> None:
    text = '"""Two\n\nlines."""\n\n\ndef f():\n    # why\n    return 1  # noqa\n'
    (tmp_path / "m.py").write_text(text)
    assert measure.lines(tmp_path) == 5
    assert measure.statements(tmp_path) == 2
    assert measure.tokens(tmp_path) == 7, "of def f(): return 1"
    assert measure.function_lengths(tmp_path) == [3]
    assert measure.comments(tmp_path) == 1
    assert measure.docstring_lines(tmp_path) == 2


def test_words_are_counted_in_prose_alone(tmp_path) -> None:
    text = "It says so.\n\n```python\nit says\n```\n`says` is code,\nand it goes on, besides.\n"
    prose = Prose("docs", tmp_path / "page.md", 10, text)
    assert [(found.line, found.word) for found in prose.found()] == [(10, "says"), (16, "goes on"), (16, "besides")]


def test_strings_of_a_file_are_told_apart(tmp_path) -> None:
    (tmp_path / "m.py").write_text('"""A module."""\nx = 1  # why so\nraise ValueError(f"the job says {x}", "key")\n')
    found = [(each.kind, each.line, each.text) for each in strings(tmp_path / "m.py")]
    assert found == [("docstrings", 1, "A module."), ("messages", 3, "the job says "), ("docstrings", 2, "why so")]


def test_functions_without_a_docstring_are_counted(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    (tmp_path / "m.py").write_text(
        'def a():\n    """Yes."""\ndef b(): ...\nclass C:\n    def d(self): ...\n    def _e(self): ...\n'
    )
    assert measure.undocumented([tmp_path]) == 66.7
