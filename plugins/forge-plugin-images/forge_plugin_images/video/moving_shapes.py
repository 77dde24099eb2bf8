"""Dataset `moving_shapes`: clips of a shape in motion, and what moves, where to and how fast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
from attrs import Factory, field, frozen
from attrs.validators import and_, deep_iterable, deep_mapping, ge, gt, in_, instance_of, min_len

from forge_core.contracts.components import DatasetComponent, default_type
from forge_core.contracts.errors import JobError, Problem
from forge_plugin_images import VideoComponent
from forge_plugin_images.video.motions import COLOURS, DIRECTIONS, SHAPES, Motion, split_motions
from forge_plugin_images.video.readers import pyav_problem
from forge_plugin_images.video_kind import NO_CLIPS
from forge_plugin_vision import Grid, image_input

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Dataset, Stream
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_vision import ImageInput

NO_TOKENIZER = 'captions need a tokenizer; add a table [data.tokenizer], for example with type = "bytes"'


def _ascending(_: Any, attribute: attrs.Attribute, value: tuple[float, float]) -> None:
    if value[0] > value[1]:
        raise ValueError(f"{attribute.name!r} must be [least, greatest], got {list(value)}")


def _even(_: Any, attribute: attrs.Attribute, value: tuple[int, int]) -> None:
    if any(side < 2 or side % 2 for side in value):
        raise ValueError(f"{attribute.name!r} must be even, as encoders halve the resolution of colours: {list(value)}")


def _words(known: Iterable[str]) -> Any:
    return and_(min_len(1), deep_iterable(in_(tuple(known))))


def _order_problem(seen: ImageInput) -> str:
    """Returns why the order of frames is hidden from a model; empty if it is not.

    Towers process frames separately, without their number, so a model can only infer the order from the positions of
    frames in the sequence, or within a patch of several frames. If clips of any length take the same number of
    positions, their features are a set (`perceiver`, `cross_attention`).
    """
    side, form = seen.format.multiple, seen.format
    rows, columns = form.grid or (side, side)
    if form.frames > 1 or seen.positions(Grid(2, rows, columns)) != seen.positions(Grid(4, rows, columns)):
        return ""
    message = "a clip takes as many positions whatever its frames are, so the model cannot know their order"
    hint = 'take the fusion "joint" and an adapter that gives each frame its own, such as pixel_shuffle'
    return f"{message}; {hint}, or an encoder of patches with several frames"


@frozen(kw_only=True)
class MovingShapes(DatasetComponent):
    """Motion: a clip, then "a red disc moves up slowly".

    Clips are drawn once, encoded as mp4 and kept in Forge's cache, and read like any others. A single frame contains no
    information about the motion: a shape starts anywhere, and what leaves a side enters at the opposite one; coding is
    lossless, so that no trace of earlier frames is left in a frame. Held-out combinations of words are never trained
    on.
    """

    video: VideoComponent = default_type("forge-plugin-images/frames")
    """`[data.sources.video]`: which frames of a clip are shown, and how."""
    colours: tuple[str, ...] = field(default=tuple(COLOURS), validator=_words(COLOURS))
    """Of the shapes."""
    shapes: tuple[str, ...] = field(default=SHAPES, validator=_words(SHAPES))
    """What moves."""
    directions: tuple[str, ...] = field(default=tuple(DIRECTIONS), validator=_words(DIRECTIONS))
    """Where to."""
    speeds: Mapping[str, int] = field(
        default=Factory(lambda: {"slowly": 1, "fast": 3}),
        validator=and_(min_len(1), deep_mapping(instance_of(str), gt(0))),
    )
    """Speeds in pixels per frame along each axis, by the words for them in captions."""
    size: tuple[int, int] = field(default=(32, 32), validator=_even)
    """Height and width of a clip in pixels."""
    frames: int = field(default=8, validator=ge(2))
    """Frames of a clip."""
    fps: float = field(default=8.0, validator=gt(0))
    """Frames a second."""
    radius: tuple[float, float] = field(default=(5.0, 7.0), validator=and_(deep_iterable(gt(0)), _ascending))
    """Of a shape in pixels, from and to."""
    noise: float = field(default=10.0, validator=ge(0))
    """Standard deviation of the noise in the background, which stands still, in levels of 255."""
    drawings: int = field(default=8, validator=ge(1))
    """Clips of each combination that is trained on: other starts, sizes and backgrounds."""
    held_out: int = field(default=48, validator=ge(0))
    """Combinations that are held out, chosen by a hash."""
    held_out_drawings: int = field(default=1, validator=ge(1))
    """Clips of each of them."""
    seed: int = field(default=0, validator=ge(0))
    """Seed of the drawings."""

    def documents(self) -> Iterator[str]:
        """Yields the captions to train on, which a tokenizer may be trained on too."""
        yield from (motion.caption for motion in split_motions(self).training)

    def build(self, context: BuildContext) -> Dataset | Stream:
        """Returns rows of clips and captions, encoded unless they are in the cache.

        Raises:
            JobError: `problems` has one, or a clip with its caption does not fit into a row.
        """
        from forge_plugin_images.video.moving_clips import stored_clips

        if problems := list(self._word_problems()):
            raise JobError(problems)
        return stored_clips(self).build(context)

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that PyAV is there, that the model sees the order of frames, and that motions can be told apart."""
        if reason := pyav_problem():  # it encodes the clips, too
            yield Problem("", reason)
        if job.data.tokenizer is None:
            yield Problem("", NO_TOKENIZER)
        try:
            seen = image_input(job)
            if problem := _order_problem(seen) if seen.format.clips else NO_CLIPS:
                yield Problem("", problem)
        except JobError as error:
            yield Problem("", error.problems[0].message)
        yield from self._word_problems()
        yield from self._motion_problems()

    def _word_problems(self) -> Iterator[Problem]:
        """Yields why a word is in no clip to train on."""
        training = split_motions(self).training
        for part, key in zip(Motion._fields, ("colours", "shapes", "directions", "speeds"), strict=True):
            trained = {getattr(motion, part) for motion in training}
            if missing := [word for word in getattr(self, key) if word not in trained]:
                message = f"{self.held_out}, and no combination with {missing[0]!r} is left to train on"
                yield Problem("held_out", f"{message}; hold out fewer, or draw more {key}")
                return

    def _motion_problems(self) -> Iterator[Problem]:
        """Yields speeds at which a shape looks as if it moved otherwise."""
        smaller = min(self.size)
        for word, speed in self.speeds.items():
            if 2 * speed >= smaller:
                message = f"{word!r} is {speed} pixels a frame, at which {smaller} pixels of a side look the same "
                yield Problem("speeds", f"{message}forwards and backwards; take less than {smaller // 2}")
        if 2 * self.radius[1] > smaller:
            yield Problem("radius", f"{self.radius[1]:g}, but a side has {smaller} pixels; take {smaller // 2} or less")
