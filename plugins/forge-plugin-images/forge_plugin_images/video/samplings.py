"""Frame samplings: which frames of a clip a model sees, from its frames' times.

A clip lasts from the beginning of its first frame to the end of its last; n frames of it are chosen. Where the rate is
constant, N frames in all, `uniform` has the numbers round(i (N-1) / (n-1)), `fps` floor(i N / n), and `middle`
floor((i + 1/2) N / n).
"""

from __future__ import annotations

from random import Random

from attrs import field, frozen
from attrs.validators import gt

from forge_plugin_images.video.kinds import TOLERANCE, Clip, FrameSamplingComponent


@frozen(kw_only=True)
class Uniform(FrameSamplingComponent):
    """Frames at equal distances, from the first to the last; n = round(duration * fps).

    Each is the frame nearest in time, as in qwen-vl-utils and Qwen3-VL's video processor.
    """

    fps: float = field(default=1.0, validator=gt(0))
    """Frames a second, between `min_frames` and `max_frames`."""

    def choose(self, clip: Clip, budget: int, random: Random | None) -> list[int]:
        """With jitter, a frame is drawn from each of n equal parts, as `Fps` does, and not from equal distances."""
        from forge_plugin_images.video.frame_choice import evenly, frames_allowed, from_parts

        count = frames_allowed(self, clip, round(clip.duration * self.fps), budget)
        if self.jitter and random is not None:
            return from_parts(clip, count, 0.0, random)
        return evenly(clip, count)


@frozen(kw_only=True)
class Fps(FrameSamplingComponent):
    """Frames at a constant rate, one shown as each of n equal parts begins; n = floor(duration * fps).

    These are the frames at seconds 0, 1 / fps, 2 / fps, … of a clip that lasts n / fps. A clip longer than
    `max_frames` / fps, or shorter than `min_frames` / fps, has that many parts. Qwen2-VL's and Qwen2.5-VL's video
    processors in `transformers` choose the same frames (`multiple = 2`, `max_frames = 768`).
    """

    fps: float = field(default=2.0, validator=gt(0))
    """Frames a second, between `min_frames` and `max_frames`."""

    def choose(self, clip: Clip, budget: int, random: Random | None) -> list[int]:
        """Rounds n down, so that a part lasts at least 1 / fps, within `TOLERANCE` for durations in floating point."""
        from forge_plugin_images.video.frame_choice import frames_allowed, from_parts

        count = frames_allowed(self, clip, int(clip.duration * self.fps + TOLERANCE), budget)
        return from_parts(clip, count, 0.0, random if self.jitter else None)


@frozen(kw_only=True)
class Middle(FrameSamplingComponent):
    """The frame shown at the middle of each of n equal parts; n = round(duration * fps).

    With `min_frames` equal to `max_frames` these are the centres of segments of TSN (Wang et al. 2016), and with
    `jitter` its frames in training.
    """

    fps: float = field(default=1.0, validator=gt(0))
    """Frames a second, between `min_frames` and `max_frames`."""

    def choose(self, clip: Clip, budget: int, random: Random | None) -> list[int]:
        """With jitter, a frame is drawn from the whole of each part."""
        from forge_plugin_images.video.frame_choice import frames_allowed, from_parts

        count = frames_allowed(self, clip, round(clip.duration * self.fps), budget)
        return from_parts(clip, count, 0.5, random if self.jitter else None)


@frozen(kw_only=True)
class Scene(FrameSamplingComponent):
    """A frame from the middle of each scene, and more from long scenes; n = round(duration * fps).

    Scenes begin at key frames: encoders write one where the picture changes at once, and one wherever the last is as
    long ago as they allow. The latter are told apart by that distance, if it occurs twice, and begin no scene. So a
    choice decodes nothing; it costs what `fps` costs, and depends on how the clip was encoded. A clip whose key frames
    are all at one distance is a single scene, and has the frames of `middle`.

    Where there are more scenes than frames, the longest ones have a frame; where there are fewer, each further frame
    goes to the scene whose frames stand for the longest time, and divides it into equal parts.
    """

    fps: float = field(default=1.0, validator=gt(0))
    """Frames a second, between `min_frames` and `max_frames`."""

    def choose(self, clip: Clip, budget: int, random: Random | None) -> list[int]:
        """With jitter, a frame is drawn from each part of a scene."""
        from forge_plugin_images.video.frame_choice import frames_allowed, from_scenes

        count = frames_allowed(self, clip, round(clip.duration * self.fps), budget)
        return from_scenes(clip, count, random if self.jitter else None)
