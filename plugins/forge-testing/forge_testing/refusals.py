"""Assertions on errors and messages that a better wording does not break: paths of keys, and facts.

A fact is a value that a message must name: a file, a number, a parameter, the key to set instead. It is found as a
whole: `3` is not in `13` or `0.3`, and `lr` not in `lr_factor`. Two errors at one path differ by their facts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from attrs import frozen

from forge_core.config.rules import check_rules
from forge_core.contracts.errors import JobError, Problem
from forge_core.plugins.catalog import Catalog

if TYPE_CHECKING:
    from forge_core.job import Job


@frozen
class ExpectedProblem:
    """A problem as a test expects it; see `at`."""

    path: str
    facts: tuple[object, ...]
    origin: str | None

    def mismatch(self, problem: Problem) -> str:
        """How a problem differs from this one; empty if it does not."""
        if problem.path != self.path:
            return f"is at {problem.path!r}, not at {self.path!r}"
        if self.origin is not None and problem.origin != self.origin:
            return f"has the origin {problem.origin!r}, not {self.origin!r}"
        absent = lacks(problem.message, *self.facts)
        return f"does not name {', '.join(absent)}" if absent else ""


def at(path: str, *facts: object, origin: str | None = None) -> ExpectedProblem:
    """Expect a problem at a path, for `refuses_all` and `check_problems`.

    Args:
        path: TOML path of the key at fault, exactly; `""` for a problem of no key.
        facts: values that the message names, such as `7`, `"train.seq_len"` or a path of a file.
        origin: where the job has the key (`"job.toml:3"`), exactly; by default, it is not compared.
    """
    return ExpectedProblem(path, facts, origin)


@contextmanager
def refuses(
    path: str, *facts: object, origin: str | None = None, error: type[JobError] = JobError
) -> Iterator[pytest.ExceptionInfo[JobError]]:
    """Assert that the block raises a `JobError` with a single problem, at this path.

        with refuses("data.sources.0.path", "missing.txt"):
            load_job("job.toml")

    Args:
        path: TOML path of the key at fault, exactly; `""` for a problem of no key.
        facts: values that the message names.
        origin: where the job has the key (`"job.toml:3"`), exactly; by default, it is not compared.
        error: class of the error, if it is a subclass of `JobError`.

    Yields:
        What `pytest.raises` yields; after the block, `value.problems` has the problem.
    """
    __tracebackhide__ = True
    with refuses_all(at(path, *facts, origin=origin), error=error) as caught:
        yield caught


@contextmanager
def refuses_all(
    *expected: ExpectedProblem | str, error: type[JobError] = JobError
) -> Iterator[pytest.ExceptionInfo[JobError]]:
    """Assert that the block raises a `JobError` with exactly these problems, in this order.

        with refuses_all(at("model.dim", 30, 4), "optimizer.lr"):
            load_job("job.toml")

    Args:
        expected: each problem, by its path or by `at`.
        error: class of the error, if it is a subclass of `JobError`.

    Yields:
        What `pytest.raises` yields.
    """
    __tracebackhide__ = True
    with pytest.raises(error) as caught:
        yield caught
    check_problems(caught.value.problems, *expected)


def check_problems(problems: Iterable[Problem], *expected: ExpectedProblem | str) -> None:
    """Assert that these are the expected problems, no more and no fewer, in this order.

        check_problems(problems_of(job, ranks=2), at("parallel.tp", 3, 2), "optimizer.lr")

    Args:
        problems: as in `JobError.problems`, from `problems_of`, or from a component's `problems(job, layout)`.
        expected: each problem, by its path or by `at`.
    """
    __tracebackhide__ = True
    actual = list(problems)
    wanted = [at(one) if isinstance(one, str) else one for one in expected]
    faults = [
        f"{problem}\n    {fault}"
        for problem, expectation in zip(actual, wanted, strict=False)
        if (fault := expectation.mismatch(problem))
    ]
    faults += [f"{problem}\n    is not expected" for problem in actual[len(wanted) :]]
    faults += [f"no problem at {expectation.path!r}" for expectation in wanted[len(actual) :]]
    if faults:
        pytest.fail("\n".join(faults))


def problems_of(job: Job, ranks: int = 1) -> list[Problem]:
    """Check a job on this number of ranks, with everything installed, and return the problems found."""
    return list(check_rules(job, Catalog.installed(), ranks))


def naming(*facts: object) -> str:
    """Return a regular expression that finds texts with all of these facts, in any order.

    It is for errors without problems, and for warnings:

        with pytest.raises(DataError, match=naming("corpus.bin", 5)):
            loader.read(5)

    Raises:
        ValueError: there are no facts, or one is empty, so that any text would fit.
    """
    if not facts:
        raise ValueError("no facts: any text would fit")
    return r"(?s)\A" + "".join(rf"(?=.*{_whole(fact)})" for fact in facts)


def lacks(text: str, *facts: object) -> list[str]:
    """Return the facts that a text does not name; a test asserts that there are none.

        assert not lacks(output, "muon", 0.02)

    Raises:
        ValueError: a fact is empty.
    """
    return [str(fact) for fact in facts if not re.search(_whole(fact), text)]


def _whole(fact: object) -> str:
    """A regular expression for a fact that is not part of a longer word or number."""
    text = str(fact)
    if not text:
        raise ValueError("a fact is empty: any text would fit")
    before = r"(?<!\w)" if re.match(r"\w", text) else ""
    before += r"(?<!\d[.,])" if text[0].isdigit() else ""
    after = r"(?!\w)" if re.search(r"\w\Z", text) else ""
    after += r"(?![.,]\d)" if text[-1].isdigit() else ""
    return f"{before}{re.escape(text)}{after}"
