"""Packings: from tokenised documents to training sequences of S positions (`train.seq_len`).

NumPy is imported late, so that a job is checked without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from forge_core.contracts.components import PackingComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Dataset, Documents, Sample
    from forge_core.data.windows import Window


@frozen(kw_only=True)
class WindowPacking(PackingComponent):
    """Base of packings that concatenate documents and cut them into windows, wherever a document ends.

    A subclass defines `sequence`, and works on documents on disk and on streams of them alike, whose sources make
    sequences of their own.
    """

    def sequence(self, window: Window) -> Sample:
        """Returns the sample (see `forge_core.contracts.data.Dataset`) of a window: S inputs, S labels."""
        raise NotImplementedError

    def build(self, context: BuildContext, documents: Documents) -> Dataset:
        from forge_core.data.windows import TrainingWindows

        return TrainingWindows(documents, context.job.train.seq_len, self)


@frozen(kw_only=True)
class Concatenate(WindowPacking):
    """Concatenates documents and cuts them every `train.seq_len` tokens, with attention from one to the next.

    Every token is an input once an epoch, except the last 1 to S, which do not fill a whole sequence.
    """

    needs_boundaries: ClassVar[bool] = False
    accepts_sequences: ClassVar[bool] = True

    def sequence(self, window: Window) -> Sample:
        return {"input_ids": window.tokens[:-1], "labels": window.labels()}
