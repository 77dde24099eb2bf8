"""The evaluation `looking`: how much a model takes from its images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import attrs
from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import EvaluationComponent
from forge_core.contracts.contexts import EvaluationContext
from forge_core.contracts.data import IGNORED_LABEL
from forge_core.contracts.errors import Problem
from forge_core.engine.evaluation import HeldOut
from forge_plugin_vision.kinds import GRIDS, PATCHES, HasImageInput

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    from forge_core.contracts.data import Dataset
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job

Seen = Literal["own", "other", "grey"]
GREY = 128


@frozen(kw_only=True)
class Looking(EvaluationComponent):
    """Held-out loss of rows with images, when the model sees their own images, those of another row, and grey ones.

    Logs `{prefix}/own_loss`, `{prefix}/other_loss` and `{prefix}/grey_loss` in nats a token, and `{prefix}/bits`: the
    bits a token that the own images are worth, (other - own) / ln 2. A model that ignores its images has 0 there,
    whatever its loss; a fault in their placement, processing or freezing shows within a hundred steps.
    """

    sequences: int = field(default=0, validator=ge(0))
    """How many sequences, evenly spread over the held-out ones; 0: all. Those without images do not count."""
    prefix: str = "looking"
    """Prefix of the names of the metrics."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if not isinstance(job.model, HasImageInput):
            yield Problem("", f"{type(job.model).__name__} sees no images; leave this evaluation out")

    def evaluate(self, context: EvaluationContext) -> Mapping[str, float]:
        if context.held_out is None:
            return {}
        kinds: tuple[Seen, ...] = ("own", "other", "grey")
        losses = {kind: self._loss(context, context.held_out, kind) for kind in kinds}
        metrics = {f"{self.prefix}/{kind}_loss": loss for kind, loss in losses.items()}
        return metrics | {f"{self.prefix}/bits": (losses["other"] - losses["own"]) / math.log(2)}

    def _loss(self, context: EvaluationContext, held_out: Dataset, kind: Seen) -> float:
        # By the core's evaluation, on other rows: so it holds for every layout.
        rows = attrs.evolve(context, held_out=ImageRows(held_out, kind))
        return HeldOut(sequences=self.sequences, prefix="").evaluate(rows)["/loss"]


@frozen
class ImageRows:
    """The rows of a dataset with their own images, another row's, or grey ones; nothing is learned in rows without."""

    dataset: Dataset
    seen: Seen
    held_out: None = None
    bytes_per_token: None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        import numpy as np

        row = self.dataset[index]
        if not _has_images(row):
            return {**row, "labels": np.full_like(row["labels"], IGNORED_LABEL)}
        if self.seen == "grey":
            return {**row, PATCHES: np.full_like(row[PATCHES], GREY)}
        return {**row, PATCHES: self._next_with_images(index)[PATCHES]} if self.seen == "other" else row

    def _next_with_images(self, index: int) -> Mapping[str, np.ndarray]:
        """Returns the row after `index` that has images; itself where no other has. The first follows the last."""
        # By number and not by neighbours in a micro-batch, so that layouts agree. Where its images have another size,
        # their patches take the places of this row's in their order.
        for number in range(1, len(self) + 1):
            row = self.dataset[(index + number) % len(self)]
            if _has_images(row):
                return row
        raise AssertionError("the row itself has images")


def _has_images(row: Mapping[str, np.ndarray]) -> bool:
    return GRIDS in row and bool(row[GRIDS].any())
