"""The packing template_name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen
from attrs.validators import ge

from forge_core import Problem
from forge_core.contracts.data import IGNORED_LABEL
from forge_core.data.packing import WindowPacking

if TYPE_CHECKING:
    import numpy as np

    from forge_core import Job
    from forge_core.contracts.layout import Layout
    from forge_core.data.windows import Window


@frozen(kw_only=True)
class TemplateName(WindowPacking):
    """Concatenated documents, cut every `train.seq_len` tokens; the first tokens of a sequence are not learned.

    They have too little context to be predicted.
    """

    needs_boundaries: ClassVar[bool] = False

    unlearned: int = field(default=4, validator=ge(0))
    """Positions at the start of each sequence whose labels are ignored, also in evaluation."""

    def sequence(self, window: Window) -> Mapping[str, np.ndarray]:
        labels = window.labels().copy()
        labels[: self.unlearned] = IGNORED_LABEL
        return {"input_ids": window.tokens[:-1], "labels": labels}

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if self.unlearned >= job.train.seq_len:
            message = f"{self.unlearned} leaves nothing to learn of train.seq_len = {job.train.seq_len}; lower it"
            yield Problem("unlearned", message)
