"""The suite gives the same verdict on a busy machine, and on any day."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parents[1]
CLOCKS = {"monotonic", "perf_counter", "time"}
DATES = {"now", "today", "utcnow"}


def files_of_tests() -> Iterator[Path]:
    for folder in (ROOT / "tests", *(ROOT / "plugins").glob("*/tests")):
        yield from (path for path in folder.rglob("*.py") if "benchmarks" not in path.parts)


def calling(paths: Iterable[Path], names: Iterable[str]) -> Iterator[tuple[Path, ast.Module]]:
    """The files in which one of these methods is called, by the text, since parsing all of them takes seconds."""
    for path in paths:
        text = path.read_text()
        if any(f".{name}(" in text for name in names):
            yield path, ast.parse(text)


def called(node: ast.AST) -> set[str]:
    """The last names of the functions that are called within `node`."""
    return {
        call.func.attr for call in ast.walk(node) if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
    }


def is_duration(node: ast.AST) -> bool:
    """Whether an expression is made of the difference of two readings of a clock."""
    parts = [part for part in ast.walk(node) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub)]
    return any(called(part) & CLOCKS for part in parts)


def timed_assertions(tree: ast.AST) -> Iterator[int]:
    """The lines of assertions that something took no longer than a limit. At least so long is true on any machine."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            for part in (part for part in ast.walk(node.test) if isinstance(part, ast.Compare)):
                values = [part.left, *part.comparators]
                for left, operator, right in zip(values[:-1], part.ops, values[1:], strict=True):
                    smaller = left if isinstance(operator, ast.Lt | ast.LtE) else right
                    if is_duration(smaller):
                        yield node.lineno


def dated_choices(tree: ast.AST) -> Iterator[int]:
    """The lines in which the date selects something: a number of the day in an index or a remainder."""
    for node in ast.walk(tree):
        selects = isinstance(node, ast.Subscript) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod))
        if selects and called(node) & DATES:
            yield node.lineno


def test_hypothesis_sets_no_deadline():
    assert hypothesis.settings.default.deadline is None


@pytest.mark.parametrize("rule", [timed_assertions, dated_choices], ids=["durations", "dates"])
def test_no_test_depends_on_the_clock(rule):
    paths = [*files_of_tests(), *(ROOT / "plugins/forge-testing").rglob("*.py")]
    files = calling(paths, CLOCKS | DATES)
    assert [f"{path}:{line}" for path, tree in files for line in rule(tree)] == []


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (timed_assertions, "assert time.monotonic() - began < 5"),
        (timed_assertions, "assert abs(x - time.time()) < 60"),
        (timed_assertions, "assert 7 < time.monotonic() - began < 23"),
        (timed_assertions, "assert 5 > time.monotonic() - began"),
        (dated_choices, "KINDS[datetime.now(UTC).toordinal() % len(KINDS)]"),
    ],
)
def test_a_dependence_on_the_clock_is_recognised(rule, code):
    assert list(rule(ast.parse(code)))


def test_forks_of_tests_leave_inherited_garbage():
    """Where it holds a process group, a collection in the fork would hang: see `exit_code_of_fork`."""
    for path, tree in calling(files_of_tests(), ["get_context"]):
        names, texts = called(tree), {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        # Processes that are spawned inherit nothing
        is_safe = "get_context" not in names or "freeze" in names or ("spawn" in texts and "fork" not in texts)
        assert is_safe, f"{path}: use forge_testing.processes.exit_code_of_fork"


def test_that_something_took_at_least_so_long_may_be_asserted():
    assert list(timed_assertions(ast.parse("assert time.monotonic() - began > 7"))) == []
