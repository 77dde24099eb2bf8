"""The dataset of packing `best_fit`. S: positions of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_core.contracts.data import IGNORED_LABEL, identity_of
from forge_core.data.windows import Window, checked
from forge_plugin_text.packing.apart import places
from forge_plugin_text.packing.packing_cache import open_packing, stored_packing

if TYPE_CHECKING:
    from forge_core.contracts.data import Documents


PIECES_NAMED = 4
"""Upper bound of the pieces of a sequence that an error names."""


class PackedSequences:
    """Sequences of whole documents; see `forge_core.contracts.data.Dataset`. A pickled copy maps the packing itself."""

    def __init__(self, documents: Documents, seq_len: int) -> None:
        stored = stored_packing(documents, seq_len)
        self._documents, self._seq_len, self._folder, self._info = documents, seq_len, stored.path, stored.info
        self._packing = open_packing(self._folder)
        held_out = documents.held_out
        self.held_out: PackedSequences | None = None if held_out is None else PackedSequences(held_out, seq_len)
        self.bytes_per_token = (documents if held_out is None else held_out).bytes_per_token

    def __len__(self) -> int:
        return len(self._packing.bounds) - 1

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        # Padding is one more document of end-of-text tokens without labels: attention keeps it apart, too.
        inputs = np.full(self._seq_len, self._documents.end_of_text, dtype=np.int64)
        labels = np.full(self._seq_len, IGNORED_LABEL, dtype=np.int64)
        starts = np.zeros(self._seq_len, dtype=bool)
        at = 0
        for start, length in self._pieces(index):
            window = self._window(start, length)
            inputs[at : at + length], labels[at : at + length] = window.tokens[:-1], window.labels()
            starts[at] = True
            at += length
        starts[at : at + 1] = True  # the padding, if any
        return {"input_ids": inputs, "labels": labels, **places(starts)}

    def _pieces(self, index: int) -> list[tuple[int, int]]:
        """Returns start and length of each piece of a sequence."""
        first, last = self._packing.bounds[checked(index, len(self)) : index + 2].tolist()
        starts, lengths = (array[first:last].tolist() for array in self._packing.pieces)
        return list(zip(starts, lengths, strict=True))

    def _window(self, start: int, length: int) -> Window:
        # One token more than positions: the label of the last
        stop = start + length + 1
        return Window(self._documents.tokens(start, stop), None, self._documents.learned(start, stop))

    def where(self, index: int) -> str:
        """See `HasLocation`."""
        pieces = self._pieces(index)
        named = [self._documents.where(start, start + length + 1) for start, length in pieces[:PIECES_NAMED]]
        more = [f"{len(pieces) - PIECES_NAMED} more pieces"] if len(pieces) > PIECES_NAMED else []
        return "; ".join(named + more)

    def spans(self, index: int) -> list[tuple[int, int]]:
        """See `forge_kit.data.origins.HasSpans`: one for each piece of a document."""
        return [(start, start + length + 1) for start, length in self._pieces(index)]

    def identity(self) -> str:
        """See `HasIdentity`."""
        return identity_of(self._documents)

    def describe(self) -> str:
        """See `HasDescription`."""
        filled = self._info["positions"] / max(len(self) * self._seq_len, 1)
        packed = f"{self._info['documents']:,} documents in {len(self):,} sequences, {filled:.2%} filled"
        return packed if self.held_out is None else f"{packed}; held out: {self.held_out.describe()}"

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memory map would be a copy of all its numbers.
        return {name: value for name, value in vars(self).items() if name != "_packing"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._packing = open_packing(self._folder)
