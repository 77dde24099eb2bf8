"""Readers: the frames that are asked for, at their true times, for no more than they cost."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import av
import numpy as np
import pytest

from forge_plugin_images.decoding import BytesImage, FileImage, SectionImage
from forge_plugin_images.video import PyAV
from forge_plugin_images.video.clips import ClipSource
from forge_plugin_images.video.readers_pyav import opened
from forge_testing.clips import bar_code, read_bar_code, write_clip

CLOCK = np.cumsum(np.random.default_rng(0).integers(10, 90, 40)) / 1000
"""Times of a variable rate."""
X264 = "keyint=12:min-keyint=12:scenecut=0"
ENCODERS = {
    "h264": ("libx264", {"g": "12", "bf": "3"}),
    "h264 with open groups": ("libx264", {"x264-params": f"{X264}:open-gop=1:bframes=3"}),
    "h264 without key frames but the first": ("libx264", {"x264-params": "keyint=12:intra-refresh=1:bframes=0"}),
    "h264 with many key frames": ("libx264", {"g": "3", "bf": "2"}),
    "hevc": ("libx265", {"x265-params": "log-level=none:keyint=12:bframes=3"}),
    "hevc in three layers": ("libx265", {"x265-params": "log-level=none:keyint=12:bframes=3:temporal-layers=3"}),
    "hevc with open groups": ("libx265", {"x265-params": "log-level=none:keyint=12:open-gop=1:bframes=3"}),
    "mpeg4": ("mpeg4", {"g": "12", "bf": "2"}),
    "vp9": ("libvpx-vp9", {"g": "12", "deadline": "realtime", "cpu-used": "8"}),
    "av1": ("libsvtav1", {"g": "12", "preset": "12"}),
}


@pytest.fixture(scope="module")
def reader():
    return PyAV().build()


def decode(path):
    """PyAV's own decoding of the whole clip: times and frames."""
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
    # One thread: PyAV keeps others with the converter of this thread, and a fork by another thread would wait for them
    return [frame.time for frame in frames], [frame.to_ndarray(format="rgb24", threads=1) for frame in frames]


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("container", ["mp4", "mkv", "ts"])
def test_each_frame_is_that_of_a_decoding_of_all(tmp_path, reader, name, container):
    encoder, options = ENCODERS[name]
    if container == "ts" and encoder in ("mpeg4", "libvpx-vp9", "libsvtav1"):
        pytest.skip("FFmpeg itself does not read it back")
    write_clip(path := tmp_path / f"clip.{container}", 40, CLOCK, encoder, options)
    times, frames = decode(path)
    clip = reader.probe(FileImage(str(path)))
    assert clip.times.tolist() == times
    for number in range(40):
        [frame] = reader.frames(FileImage(str(path)), clip, [number])
        assert read_bar_code(frame) == number
        assert np.array_equal(frame, frames[number])
    wanted = [0, 5, 6, 17, 18, 35, 39]
    assert [read_bar_code(frame) for frame in reader.frames(FileImage(str(path)), clip, wanted)] == wanted


def test_a_probe_by_the_header_and_one_by_packets_say_the_same(tmp_path, reader):
    """Fragments have no header for the whole clip, so that its packets must be read."""
    clips = []
    for name, options in (("whole.mp4", {}), ("fragments.mp4", {"movflags": "frag_keyframe+empty_moov"})):
        write_clip(path := tmp_path / name, 40, CLOCK, options={"g": "12", "bf": "3"}, container_options=options)
        before = reader.decoded
        clips.append(reader.probe(FileImage(str(path))))
        assert reader.decoded == before + bool(options)  # its first frame, for its rotation
    whole, fragments = clips
    assert np.array_equal(whole.keys, fragments.keys)
    assert whole[:2] == fragments[:2] == (32, 96)
    # FFmpeg ignores the edit list of a fragmented file: its times are later by the delay of B-frames
    assert np.allclose(np.diff(whole.times), np.diff(fragments.times), atol=1e-9)


def test_offsets_below_zero_are_shifted_as_ffmpeg_shifts_them(tmp_path, reader):
    options = {"movflags": "negative_cts_offsets"}
    write_clip(path := tmp_path / "clip.mp4", 40, CLOCK, options={"g": "12", "bf": "3"}, container_options=options)
    times, _ = decode(path)
    assert reader.probe(FileImage(str(path))).times.tolist() == times


def test_what_an_edit_list_cuts_off_is_not_shown(tmp_path, reader):
    """The edit begins 7 frames later, at a frame that only the invisible ones before it can make."""
    write_clip(path := tmp_path / "clip.mp4", 40, codec="mpeg4", options={"g": "12"})
    data = bytearray(path.read_bytes())
    at = data.index(b"elst") + 16  # behind flags, the number of edits, and the length of the first
    data[at : at + 4] = (7 * 640).to_bytes(4)  # 16,000 ticks a second
    path.write_bytes(data)
    times, frames = decode(path)
    clip = reader.probe(file := FileImage(str(path)))
    assert clip.times.tolist() == times
    assert len(times) == 33
    assert [read_bar_code(frame) for frame in reader.frames(file, clip, [0, 4, 5, 32])] == [7, 11, 12, 39]
    assert np.flatnonzero(clip.keys).tolist() == [0, 5, 17, 29]
    assert np.array_equal(reader.frames(file, clip, [2])[0], frames[2])


@pytest.mark.parametrize("container", ["mp4", "mov", "mkv"])
@pytest.mark.parametrize("angle", [90, 180, 270])
def test_frames_are_upright(tmp_path, reader, container, angle):
    turned = [np.rot90(bar_code(number), -angle // 90).copy() for number in range(6)]
    write_clip(path := tmp_path / f"clip.{container}", turned, rotation=angle)
    clip = reader.probe(file := FileImage(str(path)))
    assert (clip.height, clip.width) == (32, 96)
    assert [read_bar_code(frame) for frame in reader.frames(file, clip, [1, 5])] == [1, 5]


@pytest.mark.parametrize("axis", [0, 1])
def test_mirrored_frames_are_mirrored_back(tmp_path, reader, axis):
    mirrored = [np.flip(bar_code(number), axis).copy() for number in range(6)]
    write_clip(path := tmp_path / "clip.mp4", mirrored, mirrored=("rows", "columns")[axis])
    clip = reader.probe(file := FileImage(str(path)))
    assert [read_bar_code(frame) for frame in reader.frames(file, clip, [0, 3])] == [0, 3]


def test_an_hour_costs_what_its_sampled_frames_cost(tmp_path, reader):
    """3,600 frames, a key frame each 60: 8 frames need what lies between them and the key frames before."""
    images = [bar_code(number, 16, 112) for number in range(3600)]
    write_clip(path := tmp_path / "clip.mp4", images, range(3600), "mpeg4", {"g": "60", "bf": "0"})
    clip = reader.probe(file := FileImage(str(path)))
    assert round(clip.duration) == 3599
    wanted = [0, 7, 59, 61, 1815, 1830, 3000, 3599]
    before = reader.decoded
    assert [read_bar_code(frame) for frame in reader.frames(file, clip, wanted)] == wanted
    # One group of pictures is decoded once: up to 59; two at once, as the second key frame follows: up to 61
    assert reader.decoded - before == 62 + 31 + 1 + 60


LAYERS = "log-level=none:keyint=48:bframes=3:b-adapt=0:b-pyramid=0:temporal-layers="


@pytest.mark.parametrize(
    ("codec", "options", "decoded"),
    [
        ("libx264", {"x264-params": "keyint=48:bframes=3:b-adapt=0:b-pyramid=none"}, 11),
        ("libx265", {"x265-params": f"{LAYERS}1"}, 11),
        # Frames of a higher layer may need one that is marked as no reference: what precedes the wanted one is decoded
        ("libx265", {"x265-params": f"{LAYERS}2"}, 38),
        ("mpeg4", {"g": "48", "bf": "3"}, 11),
    ],
)
def test_frames_that_no_other_needs_are_not_decoded(tmp_path, reader, codec, options, decoded):
    """Of 41 frames up to the wanted one, three in four are B-frames."""
    write_clip(path := tmp_path / "clip.mp4", 48, codec=codec, options=options)
    clip = reader.probe(file := FileImage(str(path)))
    before = reader.decoded
    assert read_bar_code(reader.frames(file, clip, [40])[0]) == 40
    assert reader.decoded - before == decoded


def test_clips_are_read_wherever_images_are(tmp_path, reader):
    write_clip(path := tmp_path / "clip.mp4", 24)
    data = path.read_bytes()
    (archive := tmp_path / "clips.tar").write_bytes(bytes(512) + data + bytes(512))
    files = [FileImage(str(path)), BytesImage("bytes", data), SectionImage("member", str(archive), 512, len(data))]
    for file in files:
        clip = reader.probe(file)
        assert [read_bar_code(frame) for frame in reader.frames(file, clip, [3, 3, 20])] == [3, 3, 20]


def test_a_worker_decodes_in_one_thread(tmp_path):
    write_clip(path := tmp_path / "clip.mp4", 2)
    with opened(FileImage(str(path))) as (_, stream, _):
        assert stream.codec_context.thread_count == 1


def test_clips_are_probed_by_two_threads_at_once():
    """Rows are read ahead in a thread, and held-out ones in the main thread."""
    source = ClipSource(Mock(probe=lambda file: file), *[None] * 6)
    files = [object() for _ in range(20)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            for found in threads.map(lambda _: [source.probe(file) for file in files * 200], range(2)):
                assert found == files * 200
    finally:
        sys.setswitchinterval(interval)
