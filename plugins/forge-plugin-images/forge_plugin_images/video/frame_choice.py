"""Frames of a clip by their times, which the samplings are made of."""

from __future__ import annotations

from random import Random

import numpy as np

from forge_plugin_images.video.kinds import TOLERANCE, Clip, FrameSamplingComponent


def frames_allowed(sampling: FrameSamplingComponent, clip: Clip, wanted: int, budget: int) -> int:
    """Returns the number of frames to choose: `wanted` between its bounds, rounded down to a multiple of `multiple`."""
    most = min(sampling.max_frames, budget, len(clip.times))
    factor = sampling.multiple
    least = -(-sampling.min_frames // factor) * factor
    # 0 where there is room for less than one multiple: then every frame that fits is chosen
    return min(max(wanted // factor * factor, least), most // factor * factor) or most


def from_parts(clip: Clip, count: int, place: float, random: Random | None) -> list[int]:
    """Returns a frame from each of `count` equal parts of the clip: at a share `place` of the part, or a drawn one."""
    places = np.full(count, place) if random is None else np.array([random.random() for _ in range(count)])
    return shown(clip, clip.times[0] + (np.arange(count) + places) * clip.duration / count)


def evenly(clip: Clip, count: int) -> list[int]:
    """Returns frames at equal distances, the first and the last among them."""
    return nearest(clip, np.linspace(clip.times[0], clip.times[-1], count))


def from_scenes(clip: Clip, count: int, random: Random | None) -> list[int]:
    """Returns frames of all scenes, from the middle of equal parts of each, or drawn ones; see `Scene`."""
    starts = clip.times[scene_starts(clip)]
    lengths = np.diff(starts, append=clip.times[0] + clip.duration)
    shares = frames_of_scenes(lengths, count)
    times = [
        start + length * (number + (0.5 if random is None else random.random())) / share
        for start, length, share in zip(starts, lengths, shares, strict=True)
        for number in range(share)
    ]
    return shown(clip, np.array(times))


def shown(clip: Clip, times: np.ndarray) -> list[int]:
    """Returns the frame that is shown at each of these ascending times, each frame once (see `distinct`)."""
    # A computed time may be below the time of its frame by a rounding error
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
    # Each number at least one more than the last, and then, from the end, room for those behind it
    forward = np.maximum.accumulate(numbers - order) + order
    return np.minimum(forward, frames - len(numbers) + order).tolist()


def scene_starts(clip: Clip) -> np.ndarray:
    """Returns numbers of the frames that begin a scene, the first frame among them; see `Scene`."""
    keys = np.flatnonzero(clip.keys)
    distances = np.diff(keys)
    longest = distances == distances.max(initial=0)
    # The longest distance, if it occurs twice, is the encoder's maximum between key frames.
    is_refresh = longest if longest.sum() > 1 else np.zeros_like(longest)
    return np.union1d([0], keys[1:][~is_refresh])


def frames_of_scenes(lengths: np.ndarray, count: int) -> list[int]:
    """Returns the number of frames of each scene, `count` in all; scenes have lengths in any unit."""
    longest = np.argsort(-lengths, kind="stable")[:count]
    shares = np.zeros(len(lengths), int)
    shares[longest] = 1
    for _ in range(count - len(longest)):
        # Each scene has a frame by now, so that no share is 0.
        shares[np.argmax(lengths / shares)] += 1
    return shares.tolist()
