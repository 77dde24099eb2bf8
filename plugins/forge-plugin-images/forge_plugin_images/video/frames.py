"""The type `frames` of the kind `video`: which frames of a clip are shown, at what size, and whether with times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import default_type
from forge_core.contracts.errors import JobError, Problem
from forge_plugin_images.image_file import channel_problems
from forge_plugin_images.resize import AutoResize, ResizeComponent
from forge_plugin_images.video.kinds import FrameSamplingComponent, VideoReaderComponent
from forge_plugin_images.video.timestamps import format_problem
from forge_plugin_images.video_kind import VideoComponent
from forge_plugin_vision import Grid, MultimodalRope, image_input

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_images import Videos
    from forge_plugin_vision import ImageInput

POSITIONS_IN_SECONDS = 'set type = "mrope" with time = "seconds" for the rope of the language model'


@frozen(kw_only=True)
class Frames(VideoComponent):
    """Frames of a clip as one grid, whose time axis has an entry for each frame that `sampling` chooses.

    Where the encoder joins several frames in a patch, an entry has as many; the last frame is repeated to fill it.
    """

    sampling: FrameSamplingComponent = default_type("forge-plugin-images/uniform")
    """`[data.sources.video.sampling]`: which frames."""
    reader: VideoReaderComponent = default_type("forge-plugin-images/auto")
    """`[data.sources.video.reader]`: what decodes them."""
    timestamps: Literal["none", "text", "positions"] = "none"
    """How the model learns when each frame is shown. text: written before each entry of the time axis, not learned.
    positions: the rotary encoding of the model reads the batch's `grid_seconds`, which are there in any case; refused
    where it does not. none: it does not learn it."""
    timestamp_format: str = "<{seconds:.1f} seconds>"
    """With `text`: the text that is written, in Python's format; `seconds` are counted from the clip's first frame and
    averaged over the frames in a patch. The frames stand at `{frame}`, by default at the end:
    `<{seconds:.1f} seconds><|vision_start|>{frame}<|vision_end|>` is Qwen3-VL's. Special tokens of the tokenizer are
    special tokens."""
    resize: ResizeComponent = field(factory=AutoResize)
    """`[data.sources.video.resize]`: how frames get their size, as with the table of the same name for images, by a
    type that makes one image of a frame: `native` or `fill`, or for encoders of one size `stretch`, `crop` or `pad`.
    Its bounds apply to a frame."""
    max_patches: int = field(default=0, validator=ge(0))
    """Patches of a clip at most. Frames are made smaller until all of them fit, and only where that is not enough,
    fewer are chosen. 0: the model's for a sequence, shared by its images."""

    def build(self, seen: ImageInput, tokenizer: Tokenizer) -> Videos:
        """Builds the reader, too, which raises `JobError` if PyAV is missing."""
        from forge_plugin_images.video.clips import ClipSource

        return ClipSource(
            reader=self.reader.build(),
            sampling=self.sampling,
            seen=seen,
            tokenizer=tokenizer,
            resize=self.resize,
            max_patches=self.clip_patches(seen),
            timestamp_format=self.timestamp_format if self.timestamps == "text" else "",
        )

    def clip_patches(self, seen: ImageInput) -> int:
        """Returns the patches of a clip at most."""
        return self.max_patches or seen.patches_per_sequence // seen.images_per_sequence

    def key(self) -> list[object]:
        """Includes the reader, whose `max_duration` decides which clips are refused."""
        written = self.timestamp_format if self.timestamps == "text" else ""
        return ["frames", repr(self.sampling), repr(self.reader), written, repr(self.resize), self.max_patches]

    @property
    def draws(self) -> bool:
        """Whether the sampling has `jitter`."""
        return self.sampling.jitter

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks sizes against the encoder, and that the model can see the order of frames and their times."""
        try:
            seen = image_input(job)
        except JobError as error:
            yield Problem("", error.problems[0].message)
            return
        yield from self._size_problems(seen)
        yield from self._order_problems(seen)
        if self.timestamps == "text":
            yield from self._text_problems(seen)
        elif self.timestamp_format != Frames.__attrs_attrs__.timestamp_format.default:  # type: ignore[attr-defined]
            yield Problem("timestamp_format", 'it is for timestamps = "text"; set that, or leave it out')
        if self.timestamps == "positions" and not _has_positions_in_seconds(job.model):
            message = "no rotary encoding of the model places frames by their seconds"
            yield Problem("timestamps", f"'positions', and {message}; {POSITIONS_IN_SECONDS}, or take \"text\"")

    def _size_problems(self, seen: ImageInput) -> Iterator[Problem]:
        form = seen.format
        yield from channel_problems(form)
        if form.arrangements and not form.joins_tiles:
            yield Problem("", "the encoder takes images in tiles, and no videos; take another encoder")
            return
        if not self.resize.suits_frames:
            types = "'stretch', 'crop' or 'pad'" if form.grid else "'native' or 'fill'"
            message = "a frame is one image, of no more patches than its share of the clip's"
            yield Problem("resize", f"{message}, which this type does not make; take {types}")
        most, least = self.clip_patches(seen), self.resize.smallest(form)
        if most < least:
            message = f"{most} patches, and a frame has {least} at least"
            yield Problem(
                "max_patches", f"a clip has room for {message}; raise it, or model.vision.patches_per_sequence"
            )
        if most > seen.patches_per_sequence:
            room = f"model.vision.patches_per_sequence = {seen.patches_per_sequence}"
            yield Problem("max_patches", f"{most}, and a sequence has {room}; lower the one or raise the other")

    def _order_problems(self, seen: ImageInput) -> Iterator[Problem]:
        """Yields that a model would see the frames of a clip in no order: one position stands for all of them."""
        form = seen.format
        rows, columns = form.grid or (form.multiple, form.multiple)
        # Frames of one patch are ordered by its weights.
        if self.sampling.max_frames > form.frames and seen.positions(Grid(2, rows, columns)) == seen.positions(
            Grid(1, rows, columns)
        ):
            message = "the model has as many positions for a clip as for a frame, so that it sees no order of frames"
            hint = "take a fusion and an adapter that give each frame its own (joint, with any but perceiver)"
            yield Problem("", f"{message}; {hint}, or show single frames (sampling.max_frames = {form.frames})")

    def _text_problems(self, seen: ImageInput) -> Iterator[Problem]:
        if message := format_problem(self.timestamp_format):
            yield Problem("timestamp_format", f"{self.timestamp_format!r} {message}")
        form = seen.format
        rows, columns = form.grid or (form.multiple, form.multiple)
        # Three lengths: an adapter may merge two frames, or have a fixed number of positions for any clip.
        positions = [seen.positions(Grid(frames, rows, columns)) for frames in (2, 3, 4)]
        if positions != [frames * (positions[0] // 2) for frames in (2, 3, 4)]:
            takes = f"clips of 2, 3 and 4 frames take {positions[0]}, {positions[1]} and {positions[2]} positions"
            hint = 'take timestamps = "none" or "positions", or an adapter and fusion that give each frame its own'
            yield Problem(
                "timestamps", f"'text' stands between the frames of a clip, and with this model {takes}; {hint}"
            )


def _has_positions_in_seconds(model: object) -> bool:
    from forge_core.config.keys import walk_components

    ropes = (part for _, part in walk_components(model) if isinstance(part, MultimodalRope))
    return any(getattr(rope, "time", "") == "seconds" for rope in ropes)
