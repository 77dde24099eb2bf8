"""Which reader a run has, and that torchcodec, where it loads, has the same frames."""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from types import SimpleNamespace

import av
import numpy as np
import pytest

from forge_plugin_images.decoding import BytesImage, FileImage
from forge_plugin_images.video import Auto, BrokenVideo, PyAV, TorchCodec
from forge_plugin_images.video.readers import torchcodec_problem
from forge_plugin_images.video.readers_torchcodec import TorchCodecReader
from forge_testing.clips import bar_code, read_bar_code, write_clip
from forge_testing.refusals import at, check_problems, lacks, naming, refuses

needs_torchcodec = pytest.mark.skipif(bool(torchcodec_problem()), reason="torchcodec does not load here")
CLOCK = np.cumsum(np.random.default_rng(0).integers(10, 90, 40)) / 1000


@pytest.fixture
def no_torchcodec(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)


def test_pyav_that_is_missing_is_named_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr("forge_plugin_images.video.readers.find_spec", lambda name: None)
    for reader in (PyAV(), Auto()):
        check_problems(reader.problems(None, None), at("", "PyAV", "pip install 'forge-plugin-images[video]'"))
        with refuses("", "pip install 'forge-plugin-images[video]'"):
            reader.build()


def test_a_bar_code_has_room_for_its_number():
    assert read_bar_code(bar_code(15, width=48)) == 15
    with pytest.raises(ValueError, match=naming(16, "4 bars", 48)):
        bar_code(16, width=48)


def test_pyav_is_taken_first_and_its_version_is_printed():
    [(subject, choice, reason)] = Auto().choices(None)
    assert (subject, choice) == ("video_reader", "pyav")
    assert reason.startswith("PyAV ")
    assert type(Auto(max_duration=60.0).build()) is type(PyAV().build())
    assert Auto(max_duration=60.0).build().max_duration == 60.0


def test_where_torchcodec_does_not_load_the_next_reader_is_taken_and_the_reason_printed(no_torchcodec):
    auto = Auto(prefer=("torchcodec", "pyav"))
    [(_, choice, reason)] = auto.choices(None)
    assert choice == "pyav"
    assert not lacks(reason, "torchcodec", "torchcodec.decoders")
    assert type(auto.build()) is type(PyAV().build())


def test_a_job_that_insists_on_torchcodec_is_refused_where_it_does_not_load(no_torchcodec):
    check_problems(TorchCodec().problems(None, None), at("", "torchcodec.decoders", 'type = "pyav"'))
    check_problems(Auto(prefer=("torchcodec",)).problems(None, None), "prefer")
    assert not list(Auto().problems(None, None))


def test_torchcodec_is_told_times_in_the_ticks_of_the_file(tmp_path, monkeypatch):
    """Of a file whose tick is no part of a second: 1001 / 30000 s, one per frame."""
    with av.open(path := tmp_path / "clip.avi", "w") as output:
        stream = output.add_stream("mpeg4", rate=Fraction(30000, 1001))
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        frames = [av.VideoFrame.from_ndarray(bar_code(number, height=32, width=48)) for number in range(4)]
        output.mux([packet for frame in [*frames, None] for packet in stream.encode(frame)])
    told = []

    def decoder(data, *, custom_frame_mappings, **_):
        told.extend(json.loads(custom_frame_mappings)["frames"])
        raise RuntimeError("that is all")

    monkeypatch.setitem(sys.modules, "torchcodec.decoders", SimpleNamespace(VideoDecoder=decoder))
    reader = TorchCodecReader(max_duration=60.0)
    file = FileImage(str(path))
    with pytest.raises(BrokenVideo, match="that is all"):
        reader.frames(file, reader.probe(file), [0])
    assert [(frame["pts"], frame["duration"]) for frame in told] == [(0, 1), (1, 1), (2, 1), (3, 1)]


@needs_torchcodec
@pytest.mark.parametrize("container", ["mp4", "mkv"])
def test_torchcodec_has_the_frames_of_pyav(tmp_path, container):
    assert not list(TorchCodec().problems(None, None))
    [(_, choice, _)] = Auto(prefer=("torchcodec", "pyav")).choices(None)
    assert choice == "torchcodec"
    reader = Auto(prefer=("torchcodec", "pyav")).build()
    write_clip(path := tmp_path / f"clip.{container}", 40, CLOCK, options={"g": "12", "bf": "3"})
    for file in (FileImage(str(path)), BytesImage("bytes", path.read_bytes())):
        clip = reader.probe(file)
        assert np.allclose(clip.times, CLOCK if container == "mkv" else clip.times)
        for numbers in ([0, 5, 6, 17, 18, 35, 39], [3, 3, 20]):
            frames = reader.frames(file, clip, numbers)
            assert [read_bar_code(frame) for frame in frames] == numbers
            for frame, expected in zip(frames, PyAV().build().frames(file, clip, numbers), strict=True):
                assert abs(frame.astype(int) - expected).max() <= 2  # another FFmpeg may round colours otherwise


@needs_torchcodec
def test_torchcodec_turns_frames_upright_and_names_what_it_cannot_read(tmp_path):
    reader = TorchCodec().build()
    turned = [np.rot90(bar_code(number), -1).copy() for number in range(6)]
    write_clip(path := tmp_path / "clip.mp4", turned, rotation=90)
    clip = reader.probe(file := FileImage(str(path)))
    assert [read_bar_code(frame) for frame in reader.frames(file, clip, [1, 5])] == [1, 5]
    write_clip(path := tmp_path / "clip.ts", 24)
    clip = reader.probe(file := FileImage(str(path)))
    with pytest.raises(BrokenVideo, match=naming("torchcodec", "MPEG", "key frames")):
        reader.frames(file, clip, [5])
    write_clip(path := tmp_path / "clip.mkv", 40, options={"g": "12"})
    clip = reader.probe(FileImage(str(path)))
    data = path.read_bytes()
    with pytest.raises(BrokenVideo, match=r"video 'cut' .*\((torchcodec: |frame 39 )"):
        reader.frames(BytesImage("cut", data[: len(data) // 2]), clip, [39])
