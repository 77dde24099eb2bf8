"""The position encoding `mrope`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import deep_iterable, ge, gt

from forge_core.contracts.errors import JobError, Problem
from forge_plugin_transformer import PlainRope

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


TimeAxis = Literal["frames", "seconds", "apart"]


@frozen(kw_only=True)
class MultimodalRope(PlainRope):
    """Rotary encoding of three coordinates: frame, row and column of a feature (Wang et al. 2024, Qwen2-VL).

    A token's coordinates are equal, so that text is encoded as by `plain`. Features of an image start at the position
    after the text before it; the text after it continues behind the larger of its sides. Videos are images with a time
    axis, see `time`.
    """

    sections: tuple[int, int, int] = field(default=(16, 24, 24), validator=deep_iterable(ge(0)))
    """Pairs of dimensions that turn with frame, row and column; together half the rotated width of a head.
    `mrope_section` of Hugging Face configurations."""
    interleaved: bool = False
    """Whether the pairs of the coordinates take turns (Qwen3-VL) or follow one another (Qwen2-VL, Qwen2.5-VL)."""
    time: TimeAxis = "frames"
    """Where the entries of a video's time axis stand. `frames`: one position after the other (Qwen2-VL). `seconds`: as
    far apart as they are in time, by the batch's `grid_seconds` (Qwen2.5-VL). `apart`: each at a separate position,
    as an image would, with text between them or without (Qwen3-VL)."""
    positions_per_second: float = field(default=2.0, validator=gt(0))
    """For `time = "seconds"`: positions of a second, rounded down for each entry of the time axis.
    `tokens_per_second` of Hugging Face configurations."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Yields sections that cannot take turns, keys without effect, and timestamps that have no position."""
        frames, *sides = self.sections
        if self.interleaved and max(sides) > frames:  # each takes every third pair, until it has all
            message = f"{list(self.sections)} has more pairs for rows or columns than for frames"
            yield Problem("sections", f"{message}, so that they cannot take turns; change it, or interleaved = false")
        if self.positions_per_second != 2.0 and self.time != "seconds":
            message = f'{self.positions_per_second} has no meaning with time = "{self.time}"'
            yield Problem("positions_per_second", f'{message}; leave it out, or set time = "seconds"')
        yield from self._text_problems(job)

    def _text_problems(self, job: Job) -> Iterable[Problem]:
        """Yields that a source writes texts into images or videos where coordinates have no place for them."""
        for number, source in enumerate(job.data.sources):
            # By name: the components of videos are another distribution's.
            video = getattr(source, "video", source)
            written = getattr(video, "timestamps", "none")
            if text := getattr(getattr(source, "tile_text", None), "feature_row", ""):
                message = f"data.sources.{number} writes {text!r} between the rows of an image"
                hint = "leave tile_text.feature_row out there, or take another position encoding"
                yield Problem("", f"{message}, which mrope has no coordinates for; {hint}")
            if written == "text" and self.time != "apart":
                message = f"data.sources.{number} writes the time between the frames of a video"
                hint = 'set time = "apart", or another timestamps there'
                yield Problem("time", f'{message}, which "{self.time}" places without a gap; {hint}')

    def build(self, context: BuildContext, head_dim: int) -> nn.Module:
        """Build the tables for heads of this width.

        Raises:
            JobError: `sections` do not add up to half the rotated width.
        """
        from forge_plugin_vision.modules.mrope import MultimodalRotary, axes

        rotated = self.rotated(head_dim)
        if sum(self.sections) != rotated // 2:
            message = f"{list(self.sections)} has {sum(self.sections)} pairs, but heads of {head_dim} have"
            problem = Problem("attention.rope.sections", f"{message} {rotated // 2}; give as many")
            raise JobError([problem.below("language").below("model")])
        return MultimodalRotary(
            self.frequencies(rotated),
            axes(self.sections, self.interleaved),
            time=self.time,
            interval=self.positions_per_second if self.time == "seconds" else 1.0,  # else by entries
            amplitude=self.amplitude(),
            length=context.job.train.seq_len,
            dtype=context.dtype,
        )
