"""Samplings against closed forms."""

from __future__ import annotations

import numpy as np
import pytest

from forge_plugin_video import Clip, Fps, Uniform


def clip(frames, rate=25.0):
    times = np.arange(frames) / rate
    return Clip(32, 96, times, times == 0, frames / rate)


@pytest.mark.parametrize(("frames", "fps"), [(250, 1.0), (100, 0.5), (1000, 1.0), (7, 1.0), (3, 1.0), (1, 1.0)])
def test_uniform_is_a_rounded_line_from_the_first_frame_to_the_last(frames, fps):
    count = min(max(round(frames / 25 * fps), 4), 32, frames)
    expected = np.linspace(0, frames - 1, count).round()
    assert Uniform(fps=fps, max_frames=32).choose(clip(frames), 1000, None) == expected.tolist()


def test_fps_is_a_constant_rate():
    assert Fps(fps=2.5).choose(clip(100), 1000, None) == list(range(0, 100, 10))


def test_a_clip_beyond_the_cap_is_uniform():
    chosen = Fps(fps=2.0, max_frames=16).choose(clip(10_000), 1000, None)
    assert chosen == np.linspace(0, 9999, 16).round().tolist()
