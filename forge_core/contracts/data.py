"""What datasets, streams, documents and tokenizers promise to the loader.

Shapes: B sequences of a micro-batch, S positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Batch = dict[str, "Tensor"]
"""Tensors whose first dimension is B. `input_ids` (B, S) int64; `labels` (B, S) int64, the target *of each position*
(already shifted by the dataset), -100 where ignored; optional `document_ids` and `positions` (B, S), int64. Neighbours
with equal document ids are of one document, which attention does not leave; without ids, a row is one document.
Positions count from 0 where a document begins; without them, where the row begins."""

IGNORED_LABEL = -100


class Dataset(Protocol):
    """Training sequences by number, in no particular order; the engine draws the order.

    Two more methods are optional: `where(index) -> str`, the file and place that a sequence comes from, for errors; and
    `describe() -> str`, what the plan of the run says of the sequences besides their number.
    """

    @property
    def held_out(self) -> Dataset | None:
        """Sequences of documents that never occur in training, in a fixed order, or None."""
        ...

    @property
    def bytes_per_token(self) -> float | None:
        """Mean UTF-8 bytes a token of `held_out` stands for (None if unknown): loss in nats to bits per byte."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        """One sequence: `input_ids` (S,) and `labels` (S,), shifted, ignored ones -100; integers of any width."""
        ...


@runtime_checkable
class Stream(Protocol):
    """Training sequences that can only be read in order, in independent lanes (see `DocumentStream`)."""

    @property
    def held_out(self) -> Dataset | None: ...
    @property
    def bytes_per_token(self) -> float | None: ...
    @property
    def lanes(self) -> int: ...
    def read(
        self, lane: int, position: Mapping[str, Any] | None
    ) -> Iterator[tuple[Mapping[str, np.ndarray], Mapping[str, Any]]]:
        """Samples of a lane without end, each with the position (plain JSON) from which the next one is read."""
        ...


@runtime_checkable
class Documents(Protocol):
    """Tokenised documents, one after the other: what a packing makes sequences of. T tokens in all."""

    @property
    def held_out(self) -> Documents | None:
        """Documents that never occur in training, or None."""
        ...

    @property
    def bytes_per_token(self) -> float | None:
        """Mean UTF-8 bytes that a token of these documents stands for; None if unknown."""
        ...

    @property
    def end_of_text(self) -> int:
        """Id that ends every document."""
        ...

    def __len__(self) -> int:
        """T."""
        ...

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """(stop - start,) int64: the tokens [start, stop) of all documents put one after the other; a copy."""
        ...

    def learned(self, start: int, stop: int) -> np.ndarray | None:
        """(stop - start,) bool: which of these tokens are learned as labels (a chat's answers); None: all."""
        ...

    def where(self, start: int, stop: int) -> str:
        """Where these tokens come from, for errors: `tokens 0 to 9 of corpus.bin`."""
        ...

    def ends(self) -> np.ndarray:
        """(documents,) int64, ascending: the end of each document, its end-of-text included; the last is T. It may
        be a memory map.

        Raises:
            JobError: where documents end is not known; says how to provide it.
        """
        ...


class StreamedDocument(NamedTuple):
    """A tokenised document of a stream."""

    tokens: np.ndarray
    """(n,) ids, end-of-text at the end."""
    learned: np.ndarray | None
    """(n,) bool: which tokens are learned as labels; None: all."""
    position: Mapping[str, Any]
    """Plain JSON: reading from there gives this document first."""


@runtime_checkable
class DocumentStream(Protocol):
    """Documents that can only be read in order, in lanes that are independent of each other.

    Each row of the global batch belongs to one lane, whichever rank or worker loads it: what a lane gives must be a
    function of its number and position alone, and no document is in two lanes. `lanes` divides the global batch size.
    """

    @property
    def held_out(self) -> Documents | None: ...
    @property
    def lanes(self) -> int: ...
    def read(self, lane: int, position: Mapping[str, Any] | None) -> Iterator[StreamedDocument]:
        """The documents of a lane from a position on (None: from the start), without end: epoch after epoch."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back."""

    vocab_size: int
    end_of_text: int
    """Id that ends a document."""

    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def save(self, folder: Path) -> None:
        """Write what `TokenizerComponent.load` needs into `folder`."""

    def fingerprint(self) -> str:
        """SHA-256 (hex) that differs whenever an encoding could differ."""
        ...
