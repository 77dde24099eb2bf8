"""Readers: the frames that are asked for, at their true times."""

from __future__ import annotations

import numpy as np
import pytest

from forge_plugin_images.decoding import FileImage
from forge_plugin_video import PyAV
from forge_plugin_video.testing import read_bar_code, write_clip


@pytest.fixture(scope="module")
def reader():
    return PyAV().build()


CLOCK = np.cumsum(np.random.default_rng(0).integers(10, 90, 40)) / 1000
"""Times of a variable rate."""
CODECS = {
    "h264": ("libx264", {"g": "12", "bf": "3"}),
    "hevc": ("libx265", {"x265-params": "log-level=none:keyint=12:bframes=3"}),
    "mpeg4": ("mpeg4", {"g": "12", "bf": "2"}),
    "vp9": ("libvpx-vp9", {"g": "12", "deadline": "realtime", "cpu-used": "8"}),
    "av1": ("libsvtav1", {"g": "12", "preset": "12"}),
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("container", ["mp4", "mkv"])
def test_the_frames_asked_for_come_from_each_codec(tmp_path, reader, codec, container):
    encoder, options = CODECS[codec]
    write_clip(path := tmp_path / f"clip.{container}", 40, CLOCK, encoder, options)
    file = FileImage(str(path))
    clip = reader.probe(file)
    wanted = [0, 5, 6, 17, 18, 35, 39]
    assert [read_bar_code(frame) for frame in reader.frames(file, clip, wanted)] == wanted
    assert np.allclose(clip.times, CLOCK, atol=1e-9)
