"""Counts of rows: how many became documents, and how much of these is learned."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import define

from forge_kit.data.label_counts import LabelCounts
from forge_plugin_huggingface.encoding import Encoded, LeftOut


@define
class RowCounts:
    """Rows of a dataset that were encoded, and their tokens."""

    documents: int = 0
    tokens: int = 0
    """With the end-of-text of each document."""
    learned: int = 0
    """Tokens that are learned as labels, the end-of-text included where it is one."""
    empty: int = 0
    """Rows without anything to learn."""
    too_long: int = 0
    """Rows that were dropped because of their length, or of which nothing learned was left when they were cut."""
    cut: int = 0
    """Documents that are the beginning of a longer one."""

    @property
    def rows(self) -> int:
        """All rows that were counted."""
        return self.documents + self.empty + self.too_long

    def add(self, encoded: Encoded | LeftOut) -> None:
        """Count a row."""
        if not isinstance(encoded, Encoded):
            self.empty += encoded is LeftOut.EMPTY
            self.too_long += encoded is LeftOut.TOO_LONG
            return
        self.documents += 1
        labels = self.labels + LabelCounts.of(len(encoded.ids) + 1, encoded.learned_with_end())
        self.tokens, self.learned = labels.tokens, labels.learned
        self.cut += encoded.is_cut

    @property
    def labels(self) -> LabelCounts:
        """The tokens, and how many of them are learned."""
        return LabelCounts(self.tokens, self.learned)

    def describe(self) -> str:
        """Returns `3,120 documents, 41.2% of 1,204,551 tokens learned; 12 rows dropped: …`."""
        return "; ".join([f"{_some(self.documents, 'document')}, {self.labels}", *self._losses()])

    def reason(self) -> str:
        """Returns why there are no documents, as the end of a message; empty if rows have nothing to learn."""
        return f" with at most train.seq_len tokens: {'; '.join(self._losses())}" if self.too_long else ""

    def _losses(self) -> Iterator[str]:
        if self.too_long:
            yield f"{_some(self.too_long, 'row')} longer than train.seq_len dropped"
        if self.cut:
            yield f"{self.cut:,} truncated to train.seq_len"
        if self.empty:
            yield f"{_some(self.empty, 'row')} with nothing to learn left out"


def _some(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
