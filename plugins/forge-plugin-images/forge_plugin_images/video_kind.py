"""The kind `video`: what makes visuals of the clips in records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from attrs import frozen

from forge_core.contracts.components import Component
from forge_core.contracts.errors import JobError

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_plugin_images.image_file import ImageFile
    from forge_plugin_images.records import Record
    from forge_plugin_images.visuals import Visual
    from forge_plugin_vision import ImageInput

NO_TABLE = (
    "it has a video, but the source has no table that sets how frames are chosen; add [data.sources.video] below "
    "[[data.sources]] (pip install 'forge-plugin-images[video]')"
)


NO_CLIPS = "the model's encoder takes images, and no clips of videos; take another encoder, or leave videos out"


class Span(NamedTuple):
    """A part of a clip, in seconds of its file."""

    start: float = 0.0
    end: float | None = None
    """None: its end."""


class Videos(Protocol):
    """Makes visuals of clips; it can be pickled to worker processes."""

    def visual(self, file: ImageFile, span: Span, draw: str | None) -> Visual:
        """Returns a clip, which becomes one grid whose positions are `VIDEO`.

        Args:
            file: the encoded clip.
            span: the part of it that is shown.
            draw: what random choices of frames are seeded with; None: none is made.
        """


@frozen(kw_only=True)
class VideoComponent(Component[Videos]):
    """Defines which frames of a clip a model sees, and how."""

    kind = "video"
    usual_type: ClassVar[str | None] = "forge-plugin-images/frames"

    def build(self, seen: ImageInput, tokenizer: Tokenizer) -> Videos:
        """Returns what makes visuals of clips, for a model that has `seen` as its input."""
        raise NotImplementedError

    def key(self) -> list[object]:
        """Returns everything that footprints of clips depend on, other than file, tokenizer and the model's input."""
        raise NotImplementedError

    @property
    def draws(self) -> bool:
        """Whether frames are chosen at random, so that they depend on the seed and the number of the sample."""
        return False


def span_of(record: Record, values: Mapping[str, Any], start: str = "start", end: str = "end") -> Span:
    """Returns the part of a clip that an entry of a record names by these keys, in seconds; both may be absent.

    Raises:
        JobError: they are no times, or the part is empty.
    """
    for key in (start, end):
        value = values.get(key)
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= float(value) < math.inf):
            raise JobError(f"{record.place}: {key!r} is {value!r}; give seconds from the beginning of the clip")
    begin, stop = values.get(start), values.get(end)
    span = Span(float(begin or 0), None if stop is None else float(stop))
    if span.end is not None and span.end <= span.start:
        raise JobError(f"{record.place}: {end!r} is {span.end:g}, which is not after {start!r} {span.start:g}")
    return span
