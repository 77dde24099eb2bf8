"""The evaluation `looking`: how much a model takes from its images, and from the order of the frames of its clips."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import attrs
from attrs import define, field, frozen
from attrs.validators import ge

from forge_core.contracts.components import EvaluationComponent
from forge_core.contracts.contexts import EvaluationContext
from forge_core.contracts.data import IGNORED_LABEL
from forge_core.contracts.errors import Problem
from forge_core.engine.evaluation import HeldOut
from forge_plugin_vision import GRIDS, PATCHES, HasImageInput, ImageFormat, image_input

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    from forge_core.contracts.data import Dataset
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job

SeenImages = Literal["own", "other", "grey"]
SeenFrames = Literal["clip", "shuffled", "still"]
GREY = 128  # the middle of a byte, close to 0 once normalised


@frozen(kw_only=True)
class Looking(EvaluationComponent):
    """Held-out loss of rows with images, for their own images, another row's images and grey images.

    Logs `{prefix}/own_loss`, `{prefix}/other_loss` and `{prefix}/grey_loss` in nats a token, and `{prefix}/bits`: the
    bits a token that the own images are worth, (other - own) / ln 2. A model that ignores its images has 0 there,
    whatever its loss; a fault in their placement, processing or freezing shows within a hundred steps.

    Where held-out rows have clips, it logs the loss of those rows alone too: `{prefix}/clip_loss` as they are,
    `{prefix}/shuffled_loss` with the frames of each clip in a random order, the same at each evaluation, and
    `{prefix}/still_loss` with the first frame in the place of all. `{prefix}/time_bits`, (shuffled - clip) / ln 2, is
    what the order of the frames is worth in bits a token, and `{prefix}/motion_bits`, (still - clip) / ln 2, what all
    frames after the first are. Timestamps and positions stay as they are.
    """

    sequences: int = field(default=0, validator=ge(0))
    """How many sequences, evenly spread over the held-out ones; 0: all. Those without images do not count, and for the
    order of frames those without clips."""
    prefix: str = "looking"
    """Prefix of the names of the metrics."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Yields that the job's model sees no images."""
        if not isinstance(job.model, HasImageInput):
            yield Problem("", f"{type(job.model).__name__} sees no images; leave this evaluation out")

    def evaluate(self, context: EvaluationContext) -> Mapping[str, float]:
        """Returns losses in nats per token and differences in bits; nothing without held-out rows. Collective."""
        if context.held_out is None:
            return {}
        kinds: tuple[SeenImages, ...] = ("own", "other", "grey")
        # Each of the three passes adds to both counts, of which only the ratio and the sign are used.
        counts = RowCounts()
        losses = {seen: self._loss(context, ImageRows(context.held_out, seen, counts)) for seen in kinds}
        metrics = {f"{seen}_loss": loss for seen, loss in losses.items()}
        metrics["bits"] = (losses["other"] - losses["own"]) / math.log(2)
        with_images, with_clips = counts.of_all_ranks(context)
        if with_clips:
            # Where every row with images has clips, `own` is the loss of the same rows: one pass fewer.
            metrics |= self._time(context, losses["own"] if with_clips == with_images else None)
        return {f"{self.prefix}/{name}": value for name, value in metrics.items()}

    def _time(self, context: EvaluationContext, own: float | None) -> dict[str, float]:
        """Returns the metrics of rows with clips; `own` is their loss if it is known."""
        assert context.held_out is not None
        form = image_input(context.job).format
        kinds: tuple[SeenFrames, ...] = ("clip", "shuffled", "still")
        losses = {} if own is None else {"clip": own}
        # `clip` is the first of them, and is left out where its loss is known
        for seen in kinds[len(losses) :]:
            losses[seen] = self._loss(context, ClipRows(context.held_out, seen, form))
        bits = {
            name: (losses[seen] - losses["clip"]) / math.log(2)
            for name, seen in (("time_bits", "shuffled"), ("motion_bits", "still"))
        }
        return {f"{seen}_loss": loss for seen, loss in losses.items()} | bits

    def _loss(self, context: EvaluationContext, rows: Dataset) -> float:
        # By the core's evaluation, on other rows: so it holds for every layout.
        return HeldOut(sequences=self.sequences, prefix="").evaluate(attrs.evolve(context, held_out=rows))["/loss"]


@define
class RowCounts:
    """Rows that this rank has read: those with images, and those with clips among them."""

    images: int = 0
    clips: int = 0

    def of_all_ranks(self, context: EvaluationContext) -> tuple[float, float]:
        """Returns the sums over ranks, which count rows that they share each for itself. Collective."""
        import torch

        counts = torch.tensor([self.images, self.clips], dtype=torch.float64, device=context.build.device)
        images, clips = context.all_reduce(counts).tolist()
        return images, clips


@frozen
class ImageRows:
    """The rows of a dataset with their own images, another row's, or grey ones; nothing is learned in rows without."""

    dataset: Dataset
    seen: SeenImages
    counts: RowCounts = field(factory=RowCounts)
    held_out: None = None
    bytes_per_token: None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        import numpy as np

        from forge_plugin_vlm_eval.frame_order import has_clips

        row = self.dataset[index]
        if not _has_images(row):
            return _unlearned(row)
        self.counts.images += 1
        self.counts.clips += has_clips(row)
        if self.seen == "grey":
            return {**row, PATCHES: np.full_like(row[PATCHES], GREY)}
        return {**row, PATCHES: self._another_with_images(index)[PATCHES]} if self.seen == "other" else row

    def _another_with_images(self, index: int) -> Mapping[str, np.ndarray]:
        """Returns the row half-way round from `index`, or the next after that which has images; itself as the last."""
        # By number and not by places in a micro-batch, so that layouts agree; from afar, as neighbours in a file may be
        # alike. Where its images have another size, their patches take the places of this row's in their order.
        rows, half = len(self), max(1, len(self) // 2)
        for distance in (*range(half, rows), *range(1, half), 0):
            row = self.dataset[(index + distance) % rows]
            if _has_images(row):
                return row
        raise AssertionError("the row itself has images")


@frozen
class ClipRows:
    """The rows of a dataset with the frames of their clips as they are, shuffled, or each the first one.

    Nothing is learned in rows without clips.
    """

    dataset: Dataset
    seen: SeenFrames
    form: ImageFormat
    held_out: None = None
    bytes_per_token: None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        from forge_plugin_vlm_eval.frame_order import has_clips, reordered, shuffled, still

        row = self.dataset[index]
        if not has_clips(row):
            return _unlearned(row)
        if self.seen == "clip":
            return row
        # Seeded by the number of the row, so that every evaluation has the same order
        return reordered(row, self.form, shuffled(index) if self.seen == "shuffled" else still)


def _has_images(row: Mapping[str, np.ndarray]) -> bool:
    return GRIDS in row and bool(row[GRIDS].any())


def _unlearned(row: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    import numpy as np

    # The row stays, without labels, so that a number means the same row in every pass.
    return {**row, "labels": np.full_like(row["labels"], IGNORED_LABEL)}
