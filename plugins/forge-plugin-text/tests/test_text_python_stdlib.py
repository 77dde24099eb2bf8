"""The standard library as a corpus: the same documents wherever Python is installed."""

from __future__ import annotations

import platform
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from forge_plugin_text import PythonStdlib
from forge_testing.refusals import at, check_problems


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Pretends that the running interpreter's library consists of these files."""

    def write(folder: str, *names: str) -> Path:
        root = tmp_path / folder
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(f"# {name}")
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))
        return root

    return write


def names(component: PythonStdlib) -> list[str]:
    return [file.name for file in component.files()]


def test_the_running_interpreter_has_about_ten_megabytes() -> None:
    files = PythonStdlib().files()
    assert 8e6 < sum(file.stat().st_size for file in files) < 13e6
    assert {"json/decoder.py", "asyncio/tasks.py", "typing.py"} < {file.name for file in files}
    assert all(Path(file.path).is_file() for file in files)


def test_documents_are_python_files_named_relative_to_the_library_and_sorted() -> None:
    found = names(PythonStdlib())
    assert found == sorted(set(found))
    assert all(name.endswith(".py") and not name.startswith(("/", ".")) for name in found)


def test_tests_packages_tables_and_what_depends_on_the_machine_are_left_out(install) -> None:
    install(
        "lib",
        *("argparse.py", "configparser.py", "unittest/mock.py", "doctest.py", "idlelib/run.py", "this.txt"),
        *("test/test_json.py", "unittest/test/support.py", "lib2to3/tests/data/bom.py", "idlelib/idle_test/a.py"),
        *("site-packages/numpy/__init__.py", "dist-packages/apt.py", "encodings/cp037.py", "__pycache__/a.py"),
        *("_sysconfigdata__linux.py", "config-3.11-x86_64/python-config.py", "sitecustomize.py", ".hidden/a.py"),
    )
    assert names(PythonStdlib()) == [
        *("argparse.py", "configparser.py", "doctest.py", "idlelib/run.py", "unittest/mock.py"),
    ]


def test_the_place_of_the_installation_does_not_matter(install) -> None:
    fingerprints = set()
    for place in ("usr/lib/python3.11", "home/tests/.pyenv/site-packages/config-1"):
        install(place, "a.py", "b/test.py")
        assert names(PythonStdlib()) == ["a.py", "b/test.py"]
        fingerprints.add(PythonStdlib().corpus().fingerprint())
    assert len(fingerprints) == 1


def test_a_python_without_sources_is_a_problem(install, problems) -> None:
    root = install("lib", "a.pyc")
    check_problems(problems(PythonStdlib()), at("", ".py", repr(str(root))))


def test_the_standard_list_holds_for_this_python_in_any_folder(problems, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    component = PythonStdlib(held_out_list="standard")
    assert problems(component) == []
    held_out = [document.name for document, is_held_out in component.corpus().documents() if is_held_out]
    assert len(held_out) > 20
    if platform.python_version() == "3.11.7":
        assert held_out == names(component)[::20]


def test_a_file_named_like_the_standard_list_is_given_as_a_path(install, tmp_path, monkeypatch) -> None:
    install("lib", "a.py", "b.py")
    monkeypatch.chdir(tmp_path)
    Path("standard").write_text("b.py")
    documents = PythonStdlib(held_out_list="./standard").corpus().documents()
    assert [document.name for document, is_held_out in documents if is_held_out] == ["b.py"]


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'tokenizers', 'zstandard', 'transformers'}"
    program = f"import sys, forge_plugin_text; print(*({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
