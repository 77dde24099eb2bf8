"""Contracts of datasets, streams, documents and tokenizers. Shapes: B sequences of a micro-batch, S positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from attrs import field, frozen
from attrs.validators import matches_re

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


Batch = dict[str, "Tensor"]
"""Tensors whose first dimension is B. `input_ids` (B, S) int64; `labels` (B, S) int64, the target *of each position*
(already shifted by the dataset), -100 where ignored; optional `document_ids` and `positions` (B, S) int64. Neighbours
with equal document ids are of one document, which attention does not leave; without ids, a row is one document.
Positions count from 0 at the start of a document, without them of the row. Further entries have the dataset's dtype, or
are declared by `ModelComponent.batch_fields` (images, for example); rows may lack these. An entry `examples` (B,) int64
has the number of examples in each row, such as packed pairs: means of the unit `example` are over them. In training,
`sources` and `numbers` (B,) int64 contain the number of each row's source and of its sequence in that source; `slots`
(B,) int64, if some source has costs (`HasCost`), the slot in which the row was drawn. The engine adds `draw` (B,)
int64, unique to sequence and step, for noise."""
IGNORED_LABEL = -100
BYTES_PER_TOKEN = "bytes_per_token"
"""Entry (B,) float64 of batches for evaluation, where known: mean UTF-8 bytes of a token of the row's source."""


@frozen
class BatchField:
    """An entry of batches that a model requires in addition to tokens; see `ModelComponent.batch_fields`."""

    shape: tuple[int, ...]
    """Shape of one row, without B."""
    dtype: str = field(validator=matches_re("bool|uint8|int(8|16|32|64)|float(16|32|64)"))
    """Name of the dtype in numpy."""


Sample = Mapping[str, "np.ndarray"]
"""A training sequence: entries of a `Batch` without B."""
LaneSamples = Iterator[tuple[Sample, Mapping[str, Any]]]
"""Samples of a lane of a stream, each with the position (plain JSON) from which the next one is read."""


class Dataset(Protocol):
    """Training sequences by number, in any order. `HasLocation`, `HasDescription` and `HasIdentity` are optional."""

    @property
    def held_out(self) -> Dataset | None:
        """Sequences of documents that never occur in training, in a fixed order, or None."""

    @property
    def bytes_per_token(self) -> float | None:
        """Mean UTF-8 bytes a token of `held_out` stands for (None if unknown): loss in nats to bits per byte."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample:
        """Entries of a `Batch` without B, equal in shape and dtype; integers of any width. A `BatchField` may lack."""


# Optional methods stay protocols, checked by `isinstance`: a dataset is often a class of another library.
@runtime_checkable
class HasLocation(Protocol):
    """A dataset that can report the file and place of a sequence, for error messages."""

    def where(self, index: int) -> str:
        """Describes where sequence `index` is: `tokens 0 to 9 of corpus.bin`."""
        ...


@runtime_checkable
class HasDescription(Protocol):
    """A dataset that describes its sequences, in addition to their number, in a line of the run's summary."""

    def describe(self) -> str:
        """Returns the description, without line breaks."""
        ...


@runtime_checkable
class HasIdentity(Protocol):
    """Data whose replacement is detected: checkpoints keep the identity; another one needs `--resume-with-changes`."""

    def identity(self) -> str:  # called at each save, so it must return quickly
        """Differs when the content does (sizes, digests, times of change), not when it is moved; empty: unknown."""


def identity_of(data: object) -> str:
    """The identity of a source (see `HasIdentity`); empty if it does not know one."""
    return data.identity() if isinstance(data, HasIdentity) else ""


@runtime_checkable
class HasCost(Protocol):
    """A dataset whose sequences take unequal time, for example because some have more images."""

    def cost(self, index: int) -> float:
        """Returns the time beyond its tokens' time, in any unit, from sizes alone: every rank calls it for all rows."""


@runtime_checkable
class Stream(Protocol):
    """Training sequences that can only be read in order, in independent lanes.

    A lane is a function of its number and position, whichever rank or worker reads it; no sequence is in two lanes.
    `forge_kit.data.document_streams` makes one of tokenised documents.
    """

    is_packed: bool
    """Whether `[data.packing]` made its sequences of documents: others need a packing that accepts sequences."""

    @property
    def held_out(self) -> Dataset | None:
        """Sequences that occur in no lane, or None."""
        ...

    @property
    def bytes_per_token(self) -> float | None:
        """Mean UTF-8 bytes a token of `held_out` stands for; None if unknown."""
        ...

    @property
    def lanes(self) -> int:
        """Number of lanes: divides the global batch size, and is a multiple of the data-parallel ranks."""
        ...

    def read(self, lane: int, position: Mapping[str, Any] | None) -> LaneSamples:
        """The samples of a lane from a position on (None: from the start), without end."""


@runtime_checkable
class Documents(Protocol):
    """Tokenised documents, one after the other, of which a packing makes sequences. T tokens in all."""

    @property
    def held_out(self) -> Documents | None:
        """Documents that never occur in training."""

    @property
    def bytes_per_token(self) -> float | None:
        """Mean UTF-8 bytes a token of these documents stands for; None if unknown."""
        ...

    @property
    def end_of_text(self) -> int:
        """Id that ends every document."""

    def __len__(self) -> int: ...
    def tokens(self, start: int, stop: int) -> np.ndarray:
        """(stop - start,) int64: the tokens [start, stop) of all documents put one after the other; a copy."""

    def learned(self, start: int, stop: int) -> np.ndarray | None:
        """(stop - start,) bool: which of these tokens are learned as labels (a chat's answers); None: all."""

    def where(self, start: int, stop: int) -> str:
        """Where these tokens come from, for errors: `tokens 0 to 9 of corpus.bin`."""

    def ends(self) -> np.ndarray:
        """(documents,) int64, ascending, perhaps mapped: ends, end-of-text included. Raises `JobError` if unknown."""


DataSource = Dataset | Stream | Documents


class SampleRow(NamedTuple):
    """A row of the global batch, and the sample that fills it."""

    slot: int
    """Number of the row in the global batch, as it was drawn."""
    source: int
    number: int
    """Number of the sequence in its source; from a stream, the next sequence of the row's lane is taken."""


class LoadedRows(NamedTuple):
    """Rows that were read together."""

    batch: Batch
    """The entries of the samples, `sources`, `numbers`, and `slots` if some source has costs."""
    positions: Mapping[tuple[int, int], Mapping[str, Any]]
    """(source, lane) -> where the lane of a stream continues after these rows."""


class SampleReader(Protocol):
    """Reads rows for a loader. It can be pickled: each worker process has a copy."""

    @property
    def has_lanes(self) -> bool:
        """Whether some source is a stream: the rows of a lane must then be read in order, and by one copy."""

    def read(self, rows: Sequence[SampleRow]) -> LoadedRows:
        """Stack the samples of these rows. Raises a `DataError` that names what could not be read."""

    def describe(self, row: SampleRow) -> str:
        """Describes which sample a row is, and the file that it comes from if the source can report it."""


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back."""

    vocab_size: int
    end_of_text: int
    """Id that ends a document."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without end-of-text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns what `encode` returns for each text; may use several cores."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...
    def save(self, folder: Path) -> None:
        """Write what `TokenizerComponent.load` needs into `folder`."""

    def fingerprint(self) -> str:
        """SHA-256 (hex) that differs whenever an encoding or `begin_of_text` could differ."""
