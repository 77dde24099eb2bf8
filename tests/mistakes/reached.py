"""Records which functions of the product each test enters, as a pytest plugin (Python 3.12 and later).

    PYTHONPATH=tests/mistakes/recording REACHED=folder python -m pytest -p reached ...

Each process of a run, those that tests start included, appends to a file of its own: a line `T id` for each test, and
below it the functions that it entered. `draw.py --reached folder` reads them.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

FOLDER = "REACHED"
ROOT = Path(__file__).parents[2]


def key(file: str, qualified_name: str) -> str:
    """The name of a function in the files: short, as there are some millions of lines."""
    return f"{zlib.crc32(f'{file}:{qualified_name}'.encode()):08x}"


class Recorder:
    """Writes the functions that processes enter, each once per test."""

    event = "PY_START"

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self.folder = folder
        self.names: dict[int, tuple[str, CodeType]] = {}
        """By `id`, since equal codes of two files are equal; a code that is kept keeps its `id`."""
        self.process = 0
        self.test = ""
        self.file = -1

    def install(self) -> None:
        """Watch the functions of modules that are imported from here on."""
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.PROFILER_ID, "reached")
        monitoring.register_callback(monitoring.PROFILER_ID, getattr(monitoring.events, self.event), self._entered)
        get_code = importlib.machinery.SourceFileLoader.get_code

        def watched(loader: Any, name: str) -> CodeType | None:
            code = get_code(loader, name)
            path = Path(loader.path)
            if code is not None and path.is_relative_to(self.root) and "site-packages" not in path.parts:
                file = str(path.relative_to(self.root))
                if file.startswith(("forge_core/", "plugins/")) and "/tests/" not in file:
                    self._watch(code, file)
            return code

        importlib.machinery.SourceFileLoader.get_code = watched  # type: ignore[method-assign]

    def _watch(self, code: CodeType, file: str) -> None:
        self.names[id(code)] = self.name_of(code, file), code
        event = getattr(sys.monitoring.events, self.event)
        sys.monitoring.set_local_events(sys.monitoring.PROFILER_ID, code, event)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._watch(constant, file)

    def name_of(self, code: CodeType, file: str) -> str:
        """What is written of a code object."""
        return key(file, code.co_qualname.replace(".<locals>", ""))

    def text_of(self, name: str, place: int) -> str:
        """What is written of an event in it, at an offset or a line."""
        return name

    def _entered(self, code: CodeType, place: int) -> object:
        if self.process != os.getpid():  # a fork
            self.process, self.test = os.getpid(), ""
            self.file = os.open(self.folder / f"{self.process}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        lines = f"{self.text_of(self.names[id(code)][0], place)}\n"
        if test != self.test:
            self.test = test
            lines = f"T {test}\n{lines}"
        os.write(self.file, lines.encode())
        return sys.monitoring.DISABLE


def pytest_runtest_logstart() -> None:
    """Watch all functions again."""
    sys.monitoring.restart_events()


def pytest_runtest_logreport(report: Any) -> None:
    """Write down how long a test took, its fixtures included."""
    if not hasattr(report, "node"):  # one that a worker of xdist has sent is written there
        with open(Path(os.environ[FOLDER]) / f"{os.getpid()}.seconds", "a") as file:
            file.write(f"{report.duration:.3f} {report.nodeid}\n")


def read_seconds(folder: Path) -> dict[str, float]:
    """Returns how long each test took."""
    seconds: dict[str, float] = defaultdict(float)
    for path in folder.glob("*.seconds"):
        for line in path.read_text().splitlines():
            duration, _, test = line.partition(" ")
            seconds[test] += float(duration)
    return seconds


def keys_of(path: Path, file: str) -> Iterator[str]:
    """Yields the keys of all functions of a file."""

    def inside(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                yield key(file, ".".join((*names, child.name)))
                yield from inside(child, (*names, child.name))
            else:
                yield from inside(child, names)

    yield from inside(ast.parse(path.read_text()), ())


def read(folder: Path) -> dict[str, set[str]]:
    """Returns the tests that entered each function, by its `key`."""
    tests: dict[str, set[str]] = defaultdict(set)
    for path in folder.glob("*.txt"):
        test = ""
        for line in path.read_text().splitlines():
            if line.startswith("T "):
                test = line[2:]
            elif test:
                tests[line].add(test)
    return tests


if os.environ.get(FOLDER):
    Path(os.environ[FOLDER]).mkdir(parents=True, exist_ok=True)
    Recorder(ROOT, Path(os.environ[FOLDER])).install()
