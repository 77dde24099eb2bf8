"""The kinds `video_reader` and `frame_sampling`, and the properties of a clip that are read before decoding.

Frames are numbered from 0 in the order in which they are shown. H, W: height and width of the upright clip.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from attrs import field, frozen
from attrs.validators import gt

from forge_core.contracts.components import Component
from forge_core.contracts.errors import Problem
from forge_plugin_images.image_file import BrokenImage, ImageFile

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    from forge_core.contracts.layout import Layout
    from forge_core.job import Job

TOLERANCE = 1e-6
"""Seconds below which times are equal: less than any container resolves, more than floating point errs."""


class BrokenVideo(BrokenImage):
    """A clip that cannot be read; the message contains its name and the reason."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"video {name!r} cannot be read ({reason})")


class Unreadable(Exception):
    """Why a clip cannot be read, raised where its name is not known."""


class Clip(NamedTuple):
    """Properties of a clip, which a reader determines before it decodes the wanted frames."""

    height: int
    """Pixels, upright: a rotation that the file's metadata ask for is obeyed."""
    width: int
    times: np.ndarray
    """(frames,) float64 seconds at which each frame is shown, ascending, by the clock of the file: true where the rate
    varies, and not always 0 for the first frame."""
    keys: np.ndarray
    """(frames,) bool: whether decoding can start at the frame."""
    duration: float
    """Seconds from the beginning of the first frame to the end of the last."""


class VideoReader(Protocol):
    """Reads clips, wherever they are: files, members of archives, bytes, URLs. Audio is left out."""

    def probe(self, file: ImageFile) -> Clip:
        """Returns the properties of a clip without decoding it.

        Raises:
            BrokenVideo: there is no frame that could be decoded.
        """

    def frames(self, file: ImageFile, clip: Clip, numbers: Sequence[int]) -> list[np.ndarray]:
        """Returns a (H, W, 3) uint8 array in RGB for each number, upright.

        Decoding starts at the key frame before each wanted frame, and ends behind the last.

        Args:
            file: the clip.
            clip: what `probe` returned for it.
            numbers: of frames, ascending.

        Raises:
            BrokenVideo: one of them cannot be decoded.
        """


@frozen(kw_only=True)
class VideoReaderComponent(Component[VideoReader]):
    """Builds what reads clips, in one thread for each worker."""

    kind = "video_reader"
    usual_type: ClassVar[str | None] = "auto"

    max_duration: float = field(default=14_400.0, validator=gt(0))
    """Seconds of the longest clip; a longer one is refused by name, as one whose times are damaged."""

    def build(self) -> VideoReader:
        """Returns a reader, which can be pickled to worker processes."""
        raise NotImplementedError


@frozen(kw_only=True)
class FrameSamplingComponent(Component[None]):
    """Chooses frames of a clip, by their times alone."""

    kind = "frame_sampling"
    usual_type: ClassVar[str | None] = "uniform"

    min_frames: int = field(default=4, validator=gt(0))
    """Frames of the shortest clip; a clip that has fewer gives all of them."""
    max_frames: int = field(default=64, validator=gt(0))
    """Frames of the longest clip."""
    multiple: int = field(default=1, validator=gt(0))
    """The number of frames is a multiple of this: the frames of one patch, where an encoder joins several (2 for
    Qwen2.5-VL and Qwen3-VL). A clip that has fewer frames than that gives all of them."""
    jitter: bool = False
    """Whether each frame is drawn at random from its part of the clip, where the dataset draws (in training)."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that `max_frames` is at least `min_frames` and `multiple`."""
        if self.max_frames < self.min_frames:
            yield Problem("max_frames", f"{self.max_frames} is less than min_frames {self.min_frames}; raise it")
        if self.max_frames < self.multiple:
            yield Problem("max_frames", f"{self.max_frames} is less than multiple {self.multiple}; raise it")

    def choose(self, clip: Clip, budget: int, random: Random | None) -> list[int]:
        """Returns numbers of frames, ascending, each once: at least one, and `budget` at most.

        A pure function: the same clip, budget and state of `random` have the same frames in every process. How many
        they are does not depend on `random`, so a row can be planned before it is drawn.

        Args:
            clip: which has at least one frame.
            budget: number of frames that there is room for, at least 1.
            random: draws the frames if `jitter` is set; None: they are not drawn.
        """
        raise NotImplementedError
