"""The position encoding `mrope`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import deep_iterable, ge, gt

from forge_core.contracts.errors import JobError, Problem
from forge_plugin_transformer import PlainRope

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


@frozen(kw_only=True)
class MultimodalRope(PlainRope):
    """Rotary encoding of three coordinates: frame, row and column of a feature (Wang et al. 2024, Qwen2-VL).

    A token's coordinates are equal, so that text is encoded as by `plain`. Features of an image start at the position
    after the text before it; the text after it goes on behind the larger of its sides.
    """

    sections: tuple[int, int, int] = field(default=(16, 24, 24), validator=deep_iterable(ge(0)))
    """Pairs of dimensions that turn with frame, row and column; together half the rotated width of a head.
    `mrope_section` of Hugging Face configurations."""
    interleaved: bool = False
    """Whether the pairs of the coordinates take turns (Qwen3-VL) or follow one another (Qwen2-VL, Qwen2.5-VL)."""
    frame_interval: float = field(default=1.0, validator=gt(0))
    """Positions from one entry of a video's time axis to the next: Qwen2.5-VL's `tokens_per_second` times its seconds,
    rounded down for each frame. Images always have 1."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        frames, *sides = self.sections
        if self.interleaved and max(sides) > frames:
            message = f"{list(self.sections)} has more pairs for rows or columns than for frames"
            yield Problem("sections", f"{message}, so that they cannot take turns; change it, or interleaved = false")

    def build(self, context: BuildContext, head_dim: int) -> nn.Module:
        from forge_plugin_vision.modules.mrope import MultimodalRotary, axes

        rotated = self.rotated(head_dim)
        if sum(self.sections) != rotated // 2:
            message = f"{list(self.sections)} has {sum(self.sections)} pairs, but heads of {head_dim} have"
            problem = Problem("attention.rope.sections", f"{message} {rotated // 2}; give as many")
            raise JobError([problem.below("language").below("model")])
        return MultimodalRotary(
            self.frequencies(rotated),
            axes(self.sections, self.interleaved),
            frame_interval=self.frame_interval,
            amplitude=self.amplitude(),
            length=context.job.train.seq_len,
            dtype=context.dtype,
        )
