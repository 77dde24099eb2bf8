"""Frame samplings: which frames of a clip a model sees, from its frames' times.

N frames of the clip, n that are chosen.
"""

from __future__ import annotations

from random import Random

import numpy as np
from attrs import field, frozen
from attrs.validators import gt

from forge_plugin_video.kinds import Clip, FrameSamplingComponent

TOLERANCE = 1e-6
"""Seconds below which times are equal: less than any container resolves, more than floating point errs."""


@frozen(kw_only=True)
class Uniform(FrameSamplingComponent):
    """Frames at equal distances from the first to the last.

    n = round(duration * fps), at least `min_frames` and at most `max_frames`. The i-th stands at the i-th of n times
    that divide the clip equally, both ends included; where the rate is constant, its number is round(i (N-1) / (n-1)).
    """

    fps: float = field(default=1.0, validator=gt(0))
    """Frames a second, where neither bound applies."""

    def choose(self, clip: Clip, budget: int, random: Random | None) -> list[int]:
        count = frames_allowed(self, clip, round(clip.duration * self.fps), budget)
        return spread(clip, count, random if self.jitter else None)


@frozen(kw_only=True)
class Fps(FrameSamplingComponent):
    """Frames at a constant rate from the first on: at seconds 0, 1 / fps, 2 / fps, … of the clip.

    A clip that would have more than `max_frames`, or fewer than `min_frames`, has that many at equal distances, as by
    `uniform`.
    """

    fps: float = field(default=2.0, validator=gt(0))
    """Frames a second."""

    def choose(self, clip: Clip, budget: int, random: Random | None) -> list[int]:
        wanted = int(clip.duration * self.fps + TOLERANCE)
        count = frames_allowed(self, clip, wanted, budget)
        drawn = random if self.jitter else None
        if count != wanted // self.multiple * self.multiple:
            return spread(clip, count, drawn)
        steps = np.arange(count) + (0 if drawn is None else [drawn.random() for _ in range(count)])
        return nearest(clip, clip.times[0] + steps / self.fps)


def frames_allowed(sampling: FrameSamplingComponent, clip: Clip, wanted: int, budget: int) -> int:
    """Returns the number of frames to choose: `wanted` between its bounds, rounded down to a multiple of `multiple`."""
    most = min(sampling.max_frames, budget, len(clip.times))
    factor = sampling.multiple
    least = -(-sampling.min_frames // factor) * factor
    return min(max(wanted // factor * factor, least), most // factor * factor) or most


def spread(clip: Clip, count: int, random: Random | None) -> list[int]:
    """Returns frames at equal distances in time, both ends included; or one drawn from each of as many equal parts."""
    first, last = clip.times[0], clip.times[-1]
    if random is not None:
        shares = (np.arange(count) + [random.random() for _ in range(count)]) / count
    else:
        shares = np.linspace(0.0, 1.0, count) if count > 1 else np.zeros(1)
    return nearest(clip, first + shares * (last - first))


def nearest(clip: Clip, times: np.ndarray) -> list[int]:
    """Returns the frame nearest to each of these ascending times, the earlier of two, each frame once.

    Where several times fall on one frame, as on a still of a minute, its neighbours serve for the others.
    """
    last = len(clip.times) - 1
    after = np.searchsorted(clip.times, times).clip(max=last)
    before = (after - 1).clip(min=0)
    is_earlier = times - clip.times[before] <= clip.times[after] - times + TOLERANCE
    return distinct(np.where(is_earlier, before, after), last + 1)


def distinct(numbers: np.ndarray, frames: int) -> list[int]:
    """Returns as many ascending numbers of frames without repeats, moved as little as that needs."""
    order = np.arange(len(numbers))
    forward = np.maximum.accumulate(numbers - order) + order
    return np.minimum(forward, frames - len(numbers) + order).tolist()
