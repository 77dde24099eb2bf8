"""Frame samplings: which frames of a clip a model sees, from its frames' times.

A clip lasts from the beginning of its first frame to the end of its last; n frames of it are chosen. Where the rate is
constant, N frames in all, `uniform` has the numbers round(i (N-1) / (n-1)), `fps` floor(i N / n), and `middle`
floor((i + 1/2) N / n).
"""

from __future__ import annotations

from random import Random

import numpy as np
from attrs import field, frozen
from attrs.validators import gt

from forge_plugin_video.kinds import TOLERANCE, Clip, FrameSamplingComponent


@frozen(kw_only=True)
class Uniform(FrameSamplingComponent):
    """Frames at equal distances, from the first to the last; n = round(duration * fps).

    Each is the frame nearest in time, as in qwen-vl-utils and Qwen3-VL's video processor.
    """

    fps: float = field(default=1.0, validator=gt(0))
    """Frames a second, between `min_frames` and `max_frames`."""

    def choose(self, clip: Clip, budget: int, random: Random | None) -> list[int]:
        count = frames_allowed(self, clip, round(clip.duration * self.fps), budget)
        if self.jitter and random is not None:
            return from_parts(clip, count, 0.0, random)
        return nearest(clip, np.linspace(clip.times[0], clip.times[-1], count))


@frozen(kw_only=True)
class Fps(FrameSamplingComponent):
    """Frames at a constant rate: what is shown when each of n equal parts begins; n = floor(duration * fps).

    So that is at seconds 0, 1 / fps, 2 / fps, … of a clip that lasts n / fps. A longer clip than `max_frames` / fps, or
    a shorter one than `min_frames` / fps, has that many parts. Qwen2-VL's and Qwen2.5-VL's video processors in
    `transformers` choose the same frames (`multiple = 2`, `max_frames = 768`).
    """

    fps: float = field(default=2.0, validator=gt(0))
    """Frames a second, between `min_frames` and `max_frames`."""

    def choose(self, clip: Clip, budget: int, random: Random | None) -> list[int]:
        count = frames_allowed(self, clip, int(clip.duration * self.fps + TOLERANCE), budget)
        return from_parts(clip, count, 0.0, random if self.jitter else None)


@frozen(kw_only=True)
class Middle(FrameSamplingComponent):
    """What is shown at the middle of each of n equal parts; n = round(duration * fps).

    With `min_frames` equal to `max_frames` these are the centres of segments of TSN (Wang et al. 2016), and with
    `jitter` its frames in training.
    """

    fps: float = field(default=1.0, validator=gt(0))
    """Frames a second, between `min_frames` and `max_frames`."""

    def choose(self, clip: Clip, budget: int, random: Random | None) -> list[int]:
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
        count = frames_allowed(self, clip, round(clip.duration * self.fps), budget)
        starts = clip.times[scene_starts(clip)]
        lengths = np.diff(starts, append=clip.times[0] + clip.duration)
        shares = frames_of_scenes(lengths, count)
        drawn = random if self.jitter else None
        times = [
            start + length * (number + (0.5 if drawn is None else drawn.random())) / share
            for start, length, share in zip(starts, lengths, shares, strict=True)
            for number in range(share)
        ]
        return shown(clip, np.array(times))


def frames_allowed(sampling: FrameSamplingComponent, clip: Clip, wanted: int, budget: int) -> int:
    """Returns the number of frames to choose: `wanted` between its bounds, rounded down to a multiple of `multiple`."""
    most = min(sampling.max_frames, budget, len(clip.times))
    factor = sampling.multiple
    least = -(-sampling.min_frames // factor) * factor
    return min(max(wanted // factor * factor, least), most // factor * factor) or most


def from_parts(clip: Clip, count: int, place: float, random: Random | None) -> list[int]:
    """Returns a frame from each of `count` equal parts of the clip: at a share `place` of the part, or a drawn one."""
    places = np.full(count, place) if random is None else np.array([random.random() for _ in range(count)])
    return shown(clip, clip.times[0] + (np.arange(count) + places) * clip.duration / count)


def shown(clip: Clip, times: np.ndarray) -> list[int]:
    """Returns the frame that is shown at each of these ascending times, each frame once (see `distinct`)."""
    numbers = np.searchsorted(clip.times, times + TOLERANCE, side="right") - 1
    return distinct(numbers.clip(min=0), len(clip.times))


def nearest(clip: Clip, times: np.ndarray) -> list[int]:
    """Returns the frame nearest to each of these ascending times, the earlier of two, each frame once."""
    last = len(clip.times) - 1
    after = np.searchsorted(clip.times, times).clip(max=last)
    before = (after - 1).clip(min=0)
    is_earlier = times - clip.times[before] <= clip.times[after] - times + TOLERANCE
    return distinct(np.where(is_earlier, before, after), last + 1)


def distinct(numbers: np.ndarray, frames: int) -> list[int]:
    """Returns as many ascending numbers of frames without repeats.

    Where several times fall on one frame, as on a still of a minute, the frames after it serve for the others, and
    those before where there are none after it.
    """
    order = np.arange(len(numbers))
    forward = np.maximum.accumulate(numbers - order) + order
    return np.minimum(forward, frames - len(numbers) + order).tolist()


def scene_starts(clip: Clip) -> np.ndarray:
    """Returns numbers of the frames that begin a scene, the first frame among them; see `Scene`."""
    keys = np.flatnonzero(clip.keys)
    distances = np.diff(keys)
    longest = distances == distances.max(initial=0)
    is_refresh = longest if longest.sum() > 1 else np.zeros_like(longest)
    return np.union1d([0], keys[1:][~is_refresh])


def frames_of_scenes(lengths: np.ndarray, count: int) -> list[int]:
    """Returns the number of frames of each scene, `count` in all; scenes have lengths in any unit."""
    longest = np.argsort(-lengths, kind="stable")[:count]
    shares = np.zeros(len(lengths), int)
    shares[longest] = 1
    for _ in range(count - len(longest)):
        shares[np.argmax(lengths / shares)] += 1
    return shares.tolist()
