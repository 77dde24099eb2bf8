"""The kind `task`: a list of multiple-choice items."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import field, frozen
from attrs.validators import matches_re

from forge_core.contracts.components import Component


@frozen
class Item:
    """One question: which of several texts follows the context."""

    context: str
    """May be empty: the choices then begin a document."""
    choices: tuple[str, ...]
    """Texts put directly after the context, so that most begin with a space. With one alone there is nothing to choose,
    and only its bits are measured."""
    answer: int
    """Index of the right choice, from 0."""


@frozen(kw_only=True)
class TaskComponent(Component):
    """Makes or reads the items of a task; an entry of `tasks` of the evaluation `tasks`."""

    kind = "task"

    name: str = field(default="", validator=matches_re(r"[\w.+-]*"))
    """Name of the task in the metrics. Empty: its type, or the name of its file."""

    @property
    def label(self) -> str:
        """The task's name in the metrics."""
        return self.name or self._default_name

    @property
    def _default_name(self) -> str:
        return type(self).__name__.lower()

    def load(self) -> Sequence[Item]:
        """Returns the items, the same on every rank and at each call. Called before the first step.

        Raises:
            DataError: they cannot be read.
        """
        raise NotImplementedError
