"""Around a harness: how long it takes before and after the requests, and a line of git's that it would leave."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

REQUESTS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
"""Methods by which both harnesses pass requests to a model."""


class RequestTimes:
    """Measures where the time of an evaluation is spent, from its construction on."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._first: float | None = None
        self._last = self._began
        self._within = 0.0

    def follow(self, model: Any) -> None:
        """Measure each call of the model by a harness."""
        for name in REQUESTS:
            setattr(model, name, self._timed(getattr(model, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            self._first = began if self._first is None else self._first
            try:
                return method(*arguments, **options)
            finally:
                self._last = time.perf_counter()
                self._within += self._last - began

        return timed

    def facts(self) -> dict[str, float]:
        """Returns seconds before the first request, inside of requests, between them, and after the last, until now."""
        now = time.perf_counter()
        first = now if self._first is None else self._first
        last = max(self._last, first)
        return {
            "before_s": first - self._began,
            "requests_s": self._within,
            "between_s": last - first - self._within,
            "after_s": now - last,
        }


def describe(times: dict[str, float]) -> str:
    """One line for a person, of `RequestTimes.facts`."""
    before, requests, between, after = (
        f"{times[key]:.1f} s" for key in ("before_s", "requests_s", "between_s", "after_s")
    )
    return f"{before} to the first request, {requests} of requests, {between} between them, {after} after the last"


@contextmanager
def quiet_commit() -> Iterator[None]:
    """While it is active, lm-eval notes the commit of the working folder without git's error where there is none."""
    from lm_eval import evaluator

    # It runs `git describe` with the standard error of the terminal. A version that looks it up in another way has no
    # such name, and needs nothing.
    own = getattr(evaluator, "get_git_commit_hash", None)
    if own is None:
        yield
        return
    evaluator.get_git_commit_hash = _commit
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = own


def _commit() -> str | None:
    try:
        described = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()
