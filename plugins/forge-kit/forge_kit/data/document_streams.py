"""Documents that can only be read in order, and the sequences that a packing makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from forge_core.contracts.data import Dataset, Documents, LaneSamples, identity_of
from forge_core.contracts.errors import JobError
from forge_core.data.packing import WindowPacking
from forge_core.data.windows import HeldOutWindows, Window

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext


class StreamedDocument(NamedTuple):
    """A tokenised document of a stream."""

    tokens: np.ndarray
    """(n,) ids, end-of-text at the end."""
    learned: np.ndarray | None
    """(n,) bool: which tokens are learned as labels; None: all."""
    position: Mapping[str, Any]
    """Plain JSON: reading from there yields this document first."""


@runtime_checkable
class DocumentStream(Protocol):
    """Documents that can only be read in order, in independent lanes whose number divides the global batch size.

    A lane is a function of its number and position, whichever rank or worker reads it; no document is in two lanes.
    """

    @property
    def held_out(self) -> Documents | None:
        """Documents that occur in no lane, or None."""
        ...

    @property
    def lanes(self) -> int:
        """As `Stream.lanes`: independent of the layout, so that positions fit any number of ranks."""
        ...

    def read(self, lane: int, position: Mapping[str, Any] | None) -> Iterator[StreamedDocument]:
        """The documents of a lane from a position on (None: from the start), without end: epoch after epoch."""


def packed(stream: DocumentStream, context: BuildContext) -> StreamWindows:
    """Returns the training sequences of a stream, as `[data.packing]` makes them: what a source's `build` returns.

    Raises:
        JobError: the packing needs all documents at once.
    """
    packing = context.job.data.packing
    if not isinstance(packing, WindowPacking):
        raise JobError(
            "is a stream, and [data.packing] needs all documents at once; "
            "take another packing, or read the data as a whole"
        )
    return StreamWindows(stream, context.job.train.seq_len, packing)


class StreamWindows:
    """The windows of each lane of a stream, in order: a `forge_core.contracts.data.Stream`.

    Each window shares one token with the next, as windows over documents on disk do.
    """

    is_packed = True

    def __init__(self, stream: DocumentStream, seq_len: int, packing: WindowPacking) -> None:
        self.stream, self._seq_len, self._packing = stream, seq_len, packing
        self.lanes, held_out = stream.lanes, stream.held_out
        self.held_out: Dataset | None = None if held_out is None else HeldOutWindows(held_out, seq_len, packing)
        self.bytes_per_token = None if held_out is None else held_out.bytes_per_token

    def identity(self) -> str:
        """See `forge_core.contracts.data.HasIdentity`."""
        return identity_of(self.stream)

    def read(self, lane: int, position: Mapping[str, Any] | None) -> LaneSamples:
        """See `forge_core.contracts.data.Stream`."""
        # A position is a document of the stream and the tokens to skip in it: windows end inside documents.
        start, skip = (None, 0) if position is None else (position["document"], position["skip"])
        documents = self.stream.read(lane, start)
        document = next(documents)
        while True:
            pieces, missing = [_piece(document, skip, self._seq_len + 1)], self._seq_len + 1
            while missing := missing - len(pieces[-1].tokens):
                document, skip = next(documents), 0
                pieces.append(_piece(document, skip, missing))
            skip += len(pieces[-1].tokens) - 1  # the next window begins with this one's last token
            tokens, starts, learned = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
            window = Window(tokens.astype(np.int64), starts, learned)
            yield self._packing.sequence(window), {"document": document.position, "skip": skip}


def _piece(document: StreamedDocument, skip: int, count: int) -> Window:
    """The tokens of a document from `skip` on, at most `count` of them."""
    part = slice(skip, skip + count)
    tokens, learned = document.tokens[part], document.learned
    starts = np.arange(skip, skip + len(tokens)) == 0
    return Window(tokens, starts, np.ones(len(tokens), dtype=bool) if learned is None else learned[part])
