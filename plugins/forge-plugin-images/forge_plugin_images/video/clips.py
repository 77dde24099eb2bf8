"""Clips as visuals: measured by their times alone, and read a few frames at a time.

f: frames of a patch, t: entries of the time axis, V: values of a patch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, field, frozen
from PIL import Image

from forge_plugin_images.processing import ImageProcessor
from forge_plugin_images.rows import Footprint, Places, Tokens
from forge_plugin_images.video.kinds import BrokenVideo, Clip, FrameSamplingComponent, VideoReader
from forge_plugin_images.video.throughput import decoding
from forge_plugin_images.video.timestamps import texts_between
from forge_plugin_vision import VIDEO, Grid

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_plugin_images import Span
    from forge_plugin_images.image_file import ImageFile
    from forge_plugin_images.resize import ResizeComponent
    from forge_plugin_vision import ImageFormat, ImageInput

BYTES_AT_ONCE = 2**25
"""Decoded frames that are in memory at once, unless a patch needs more: a document's patches are all that stays."""
PROBED = 8
"""Clips whose times are remembered between measuring and reading a document."""


@frozen
class Choice:
    """The frames of a clip that are shown."""

    numbers: Sequence[int]
    """Their numbers in the clip, ascending."""
    times: np.ndarray
    """(t,) float64: when each entry of the time axis is shown, in seconds from the clip's first frame."""
    grid: Grid


@frozen
class ClipSource:
    """See `forge_plugin_images.Videos`."""

    reader: VideoReader
    sampling: FrameSamplingComponent
    seen: ImageInput
    tokenizer: Tokenizer
    resize: ResizeComponent
    """How frames get their size."""
    max_patches: int
    """Of a clip."""
    timestamp_format: str
    """Empty: no times are written."""
    _probed: deque[tuple[ImageFile, Clip]] = field(factory=lambda: deque(maxlen=PROBED), eq=False, repr=False)

    def visual(self, file: ImageFile, span: Span, draw: str | None) -> ClipVisual:
        """Opens nothing: the file is read when the visual is measured."""
        return ClipVisual(file, span, draw, self)

    def probe(self, file: ImageFile) -> Clip:
        """Returns the properties of a clip without decoding it; raises `BrokenVideo`."""
        # A copy, as rows are read ahead in a thread while held-out ones are read here. By identity: names of bytes and
        # of members of archives need not be unique
        known = next((clip for each, clip in tuple(self._probed) if each is file), None)
        if known is None:
            self._probed.append((file, known := self.reader.probe(file)))
        return known

    def choose(self, file: ImageFile, span: Span, draw: str | None) -> Choice:
        """Returns the frames of a part of a clip; a pure function of the clip, the part and `draw`.

        Raises:
            BrokenVideo: the clip cannot be read, or has no frame there.
        """
        clip, form = self.probe(file), self.seen.format
        seconds = clip.times - clip.times[0]
        first, part = _part(file, clip, seconds, span)
        # In frames, of which an entry of the time axis has `form.frames` in the patches of one
        budget = self.max_patches // self.resize.smallest(form) * form.frames
        random = None if draw is None else Random(draw)  # noqa: S311  (a text seeds it by SHA-512, equal everywhere)
        chosen = self.sampling.choose(part, budget, random)
        numbers = [first + number for number in chosen]
        times = np.array([seconds[list(group)].mean() for group in _filled(numbers, form.frames)])
        [grid] = self.processor(len(times)).grids((clip.height, clip.width))
        return Choice(numbers, times, Grid(len(times), grid.rows, grid.columns))

    def processor(self, entries: int) -> ImageProcessor:
        """Returns what makes patches of single frames of a clip with so many entries on its time axis.

        As many pixels as its budget has are shared by all entries: `max_pixels` of Qwen3-VL's video processor.
        """
        # Frame by frame; `joined` puts the frames of a patch together.
        seen = evolve(self.seen, format=evolve(self.seen.format, frames=1))
        return ImageProcessor(self.resize.build(seen, self.max_patches / entries))

    def footprint(self, choice: Choice) -> Footprint:
        """Returns what a clip takes in a row."""
        positions, times = self.seen.positions(choice.grid), choice.times
        seconds = float(np.diff(times).mean()) if len(times) > 1 else 0.0
        if not self.timestamp_format:
            return Footprint([Places(positions, VIDEO)], [choice.grid], [seconds])
        encode: Any = getattr(self.tokenizer, "encode_special", self.tokenizer.encode)
        first, *others = (Tokens(encode(text), False) for text in texts_between(self.timestamp_format, times.tolist()))
        runs: list[Tokens | Places] = [first]
        for text in others:
            # `Frames` refuses models whose positions are not divisible by the frames.
            runs += [Places(positions // len(times), VIDEO), text]
        return Footprint([run for run in runs if isinstance(run, Places) or len(run.ids)], [choice.grid], [seconds])

    def patches(self, file: ImageFile, choice: Choice) -> np.ndarray:
        """Returns the patches of the chosen frames, (patches, V) uint8; raises `BrokenVideo`."""
        form, processor = self.seen.format, self.processor(choice.grid.frames)
        # Filled in place: a concatenation at the end would need the memory twice
        patches = np.empty((choice.grid.patches, form.values), np.uint8)
        per_entry, end = choice.grid.rows * choice.grid.columns, 0
        entries: list[np.ndarray] = []
        for frame in self._frames(file, choice.numbers):
            entries.append(processor.patches(Image.fromarray(frame)))
            if len(entries) == form.frames:
                patches[end : end + per_entry] = joined(entries, form)
                end, entries = end + per_entry, []
        if entries:
            patches[end:] = joined([*entries, *entries[-1:] * (form.frames - len(entries))], form)
        return patches

    def check(self, file: ImageFile, span: Span) -> None:
        """Decode all frames of a part of a clip, a bounded number at a time; raises `BrokenVideo`."""
        clip = self.probe(file)
        first, part = _part(file, clip, clip.times - clip.times[0], span)
        for _ in self._frames(file, range(first, first + len(part.times))):
            pass

    def _frames(self, file: ImageFile, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """Yields frames (H, W, 3) uint8, of which a bounded number of bytes is in memory at once."""
        clip = self.probe(file)
        at_once = max(1, BYTES_AT_ONCE // (3 * clip.height * clip.width))
        for start in range(0, len(numbers), at_once):
            with decoding(len(numbers[start : start + at_once])):
                frames = self.reader.frames(file, clip, numbers[start : start + at_once])
            while frames:
                # The list gives up each frame, so that it is freed once its patches are made.
                yield frames.pop(0)


@frozen
class ClipVisual:
    """A clip, or a part of it: one grid. See `forge_plugin_images.visuals.Visual`."""

    file: ImageFile
    span: Span
    draw: str | None
    source: ClipSource

    def measure(self) -> Footprint:
        """Reads the container's times and size, and chooses the frames by them."""
        return self.source.footprint(self.choice())

    def read(self) -> np.ndarray:
        """Decodes the frames that `measure` chose: the choice depends on the clip and `draw` alone."""
        return self.source.patches(self.file, self.choice())

    def check(self) -> None:
        """Decodes every frame of the part, since a sampling with jitter may choose any of them."""
        self.measure()
        self.source.check(self.file, self.span)

    def choice(self) -> Choice:
        """Returns the frames that are shown; raises `BrokenVideo`."""
        return self.source.choose(self.file, self.span, self.draw)


def joined(frames: Sequence[np.ndarray], form: ImageFormat) -> np.ndarray:
    """Returns patches of several frames, (patches, V), of the (patches, V / f) of each."""
    alone = [each.reshape(len(each), form.channels, 1, form.patch**2) for each in frames]
    return np.concatenate(alone, axis=2).reshape(-1, form.values)


def _filled(numbers: Sequence[int], frames: int) -> Iterator[Sequence[int]]:
    """Yields the frames of each entry of the time axis: the last one is repeated until its patch is full."""
    for start in range(0, len(numbers), frames):
        group = [*numbers[start : start + frames]]
        yield group + group[-1:] * (frames - len(group))


def _part(file: ImageFile, clip: Clip, seconds: np.ndarray, span: Span) -> tuple[int, Clip]:
    """Returns the number of the first frame of a part of a clip, and the part as a clip."""
    if span.start == 0 and span.end is None:
        return 0, clip
    stop = clip.duration if span.end is None else min(span.end, clip.duration)
    # The frame that is shown when the part begins was shown before it.
    first = max(0, int(np.searchsorted(seconds, span.start, side="right")) - 1)
    last = int(np.searchsorted(seconds, stop, side="left"))
    if span.start >= clip.duration:
        raise BrokenVideo(
            file.name, f"a part from {span.start:g} s on is asked for, and it ends at {clip.duration:g} s"
        )
    part = Clip(clip.height, clip.width, clip.times[first:last], clip.keys[first:last], stop - span.start)
    return first, part
