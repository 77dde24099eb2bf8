"""Where documents come from: the file, line and id of each, as the writer or reader of its file recorded it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from attrs import field, frozen

if TYPE_CHECKING:
    import numpy as np

ID = "id"


@frozen
class Origin:
    """Where a document comes from."""

    file: str
    """As it was named when the document was read."""
    line: int | None = None
    """Line or row of the file, from 1; None: the file is the document, or its place is not known."""
    fields: Mapping[str, str] = field(factory=dict)
    """What else is known of the document: its `id`, where it has one."""

    @property
    def id(self) -> str | None:
        """The id that the document had in its file; None: it had none."""
        return self.fields.get(ID)

    @property
    def place(self) -> str:
        """File and line: `web/a.jsonl:17`."""
        return self.file if self.line is None else f"{self.file}:{self.line}"

    def __str__(self) -> str:
        known = ", ".join(f"{name} {value}" for name, value in self.fields.items())
        return f"{self.place} ({known})" if known else self.place


@runtime_checkable
class HasOrigins(Protocol):
    """Documents (`forge_core.contracts.data.Documents`) with the place that each comes from."""

    def origins(self, numbers: np.ndarray) -> Sequence[Origin | None]:
        """Returns the origin of documents; None where it is not known.

        Args:
            numbers: (documents,) ascending: the document that ends at `ends()[number]`.

        Raises:
            DataError: what states the origins is damaged.
        """
        ...


@runtime_checkable
class HasSpans(Protocol):
    """A dataset that was packed from documents, and can list the tokens of each sequence."""

    def spans(self, index: int) -> Sequence[tuple[int, int]]:
        """Returns the tokens [start, stop) of the documents that sequence `index` has, in order, labels included.

        A span takes `stop - start - 1` positions of the sequence: its last token is a label alone.
        """
        ...
