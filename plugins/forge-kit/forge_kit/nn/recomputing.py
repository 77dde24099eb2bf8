"""A second forward pass of a step, in which nothing counts again."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_core.auxiliary import Auxiliary


class Recomputing(AbstractContextManager):
    """Marks a second forward pass, such as a recomputation: metrics do not count again. One may lie within another."""

    # A class and not a generator: zero-bubble schedules enter one object many times.
    def __init__(self, auxiliary: Auxiliary) -> None:
        self._auxiliary = auxiliary
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(self._auxiliary.recomputing)
        self._auxiliary.recomputing = True

    def __exit__(self, *exc: object) -> None:
        self._auxiliary.recomputing = self._before.pop()
