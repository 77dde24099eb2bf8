"""Clips that cannot be read: each is refused with its name and a reason, and none in silence."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import av
import numpy as np
import pytest
from attrs import evolve

from forge_plugin_images import Span
from forge_plugin_images.decoding import BytesImage, FileImage
from forge_plugin_images.image_file import BrokenImage
from forge_plugin_images.video import BrokenVideo, Frames, PyAV, Uniform, frame_tables
from forge_plugin_images.video.kinds import Unreadable
from forge_plugin_images.video.orientation import Turn
from forge_plugin_text.bytes import ByteTokenizer
from forge_plugin_vision import Joint
from forge_testing.clips import bar_code, read_bar_code, write_clip
from forge_testing.images import tiny_model
from forge_testing.refusals import naming

GROUPS = {"g": "12", "bf": "2"}
CODECS = {
    "libx264": GROUPS,
    "libx265": {"x265-params": "log-level=none:keyint=12"},
    "mpeg4": GROUPS,
    "libsvtav1": {"g": "12", "preset": "12"},
}


@pytest.fixture(scope="module")
def reader():
    return PyAV().build()


def write(path, **kwargs):
    """A clip of 40 frames, with a key frame each 12."""
    write_clip(path, 40, **{"options": GROUPS, **kwargs})


def rewrite(path, is_dropped=lambda packet: False, **options):
    """Replaces a clip by a copy of its packets, without some."""
    copy = path.with_name(f"copy-{path.name}")
    with av.open(str(path)) as source, av.open(str(copy), "w", options=options) as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.size and not is_dropped(packet):
                packet.stream = stream
                target.mux(packet)
    copy.replace(path)


def write_sound(path, codec="aac", cover=False):
    with av.open(str(path), "w") as output:
        stream = output.add_stream(codec, rate=16_000)
        if cover:  # a video stream of one frame, to FFmpeg
            picture = output.add_stream("mjpeg", rate=25)
            picture.height, picture.width, picture.pix_fmt = 32, 96, "yuvj420p"
            output.mux(picture.encode(av.VideoFrame.from_ndarray(bar_code(1))))
            output.mux(picture.encode(None))
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate, frame.time_base, frame.pts = 16_000, Fraction(1, 16_000), 0
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


def write_header(path):
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=25)
        stream.height, stream.width, stream.pix_fmt = 32, 96, "yuv420p"
        output.start_encoding()


def write_without_key_frames(path):
    write(path)
    rewrite(path, lambda packet: packet.is_keyframe)


def write_cut_before_header(path):
    write(path)
    path.write_bytes(path.read_bytes().partition(b"moov")[0])


def write_cut_in_pictures(path):
    write(path)
    path.write_bytes(path.read_bytes().partition(b"moov")[0][:-100])


def write_without_header(path):
    write(path)
    path.write_bytes(path.read_bytes().partition(b"moov")[0][:-4])


def write_cut_after_header(path):
    write(path)
    rewrite(path, movflags="faststart")
    path.write_bytes(path.read_bytes()[:-500])


BROKEN = {
    "empty.mp4": (lambda path: path.write_bytes(b""), ["empty"]),
    "text.mp4": (lambda path: path.write_bytes(b"no video" * 100), ["Invalid data"]),
    "sound.mp4": (write_sound, ["no video stream", "audio; audio"]),
    "song.mp3": (lambda path: write_sound(path, "libmp3lame", cover=True), ["no video stream", "audio"]),
    "header.mkv": (write_header, ["first frame"]),
    "no key frames.mkv": (write_without_key_frames, ["no key frame"]),
    "cut before its header.mp4": (write_cut_before_header, ["truncated", "boxes"]),
    "cut in its pictures.mp4": (write_cut_in_pictures, ["truncated", "boxes"]),
    "not finished.mp4": (write_without_header, ["moov"]),
    "cut after its header.mp4": (write_cut_after_header, ["truncated", "header"]),
    "ten hours.mp4": (
        lambda path: write(path, times=np.arange(40) * 930),
        ["36,270 s", "max_duration 14,400"],
    ),
    "out of order.avi": (lambda path: write(path, codec="mpeg4"), ["two frames", "time"]),
    "stream.h264": (write, ["no times", "mp4"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_probe_names_the_clip_and_the_reason(tmp_path, reader, name):
    write_file, facts = BROKEN[name]
    write_file(path := tmp_path / name)
    for file in (FileImage(str(path)), BytesImage(str(path), path.read_bytes())):
        with pytest.raises(BrokenVideo, match=naming(f"video {str(path)!r}", *facts)) as caught:
            reader.probe(file)
        assert isinstance(caught.value, BrokenImage)  # clips count among the images that cannot be read


@pytest.mark.parametrize(
    ("keys", "unseen", "facts"),
    [
        ([], [], ["no frames"]),
        ([False, False], [False, False], ["no key frame"]),
        ([True, False], [True, True], ["edit list"]),
        ([False, True], [False, True], ["edit list"]),
    ],
)
def test_tables_of_which_no_frame_is_shown_are_refused(keys, unseen, facts):
    stamps = np.arange(len(keys))
    tables = frame_tables.Frames(stamps, np.array(keys, bool), np.array(unseen, bool), stamps + 1)
    with pytest.raises(Unreadable, match=naming(*facts)):
        frame_tables.clip_of(tables, SimpleNamespace(time_base=Fraction(1, 25)), Turn(), 1.0)


def test_times_that_frames_are_not_shown_at_are_refused(tmp_path, reader):
    def swap(packet):
        packet.dts = packet.pts - 80
        packet.pts += -40 if packet.pts // 40 % 2 else 40

    write(path := tmp_path / "clip.mkv", options={"g": "12", "bf": "0"})
    rewrite(path, swap)
    clip = reader.probe(file := FileImage(str(path)))
    with pytest.raises(BrokenVideo, match=naming("clip.mkv'", "times", "mp4")):
        reader.frames(file, clip, range(10))


def damaged(path, codec="libx264"):
    """A clip whose frames 15 and 16 are damaged, and all after them in their group."""
    write(path, codec=codec, options=CODECS[codec])
    with av.open(str(path)) as container:  # its entries do not outlive it
        spots = [(entry.pos, entry.size) for entry in container.streams.video[0].index_entries]
    data = bytearray(path.read_bytes())
    for start, size in spots[15:17]:
        data[start + 12 : start + size] = bytes(max(0, size - 12))
    return BytesImage("clip.mp4", bytes(data))


@pytest.mark.parametrize("codec", CODECS)
def test_damage_in_the_middle_is_found_in_its_group_alone(tmp_path, reader, codec):
    clip = reader.probe(file := damaged(tmp_path / "clip.mp4", codec))
    whole = [*range(12), *range(24, 40)]
    assert [read_bar_code(frame) for frame in reader.frames(file, clip, whole)] == whole
    for number in (18, 23):
        with pytest.raises(BrokenVideo, match=naming("'clip.mp4'", f"frame {number} at {number / 25:.3f} s")):
            reader.frames(file, clip, [0, number, 30])


def test_checking_a_clip_decodes_what_is_not_shown(tmp_path):
    seen = evolve(tiny_model(32, 96, patches_per_sequence=96), fusion=Joint()).image_input()
    videos = Frames(sampling=Uniform(min_frames=2, max_frames=2), reader=PyAV()).build(seen, ByteTokenizer())
    file = damaged(tmp_path / "clip.mp4")
    visual = videos.visual(file, Span(), None)
    assert len(visual.read()) == visual.measure().patches  # of the first and the last frame
    with pytest.raises(BrokenVideo, match=r"'clip\.mp4' .*frame 1[2-9] at "):
        visual.check()
    videos.visual(file, Span(1.0, 1.4), None).check()  # behind it


def test_a_header_that_calls_every_frame_a_key_frame_is_not_believed(tmp_path, reader):
    write_without_key_frames(path := tmp_path / "clip.mp4")
    clip = reader.probe(file := FileImage(str(path)))
    assert clip.keys.all()
    with pytest.raises(BrokenVideo, match=naming("clip.mp4'", "frame 5 at 0.200 s")):
        reader.frames(file, clip, [5])


def test_a_clip_that_begins_between_key_frames_begins_with_the_next(tmp_path, reader):
    write(path := tmp_path / "clip.mkv")
    rewrite(path, lambda packet: packet.is_keyframe and packet.pts == 0)
    clip = reader.probe(file := FileImage(str(path)))
    assert clip.times[0] == 0.48
    assert [read_bar_code(frame) for frame in reader.frames(file, clip, [0, 27])] == [12, 39]


def test_a_matroska_clip_that_is_cut_has_the_frames_that_are_left(tmp_path, reader):
    write(path := tmp_path / "clip.mkv", options={"g": "12", "bf": "0"})
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 4 // 5])
    clip = reader.probe(file := FileImage(str(path)))
    frames = len(clip.times)
    assert 12 < frames < 40
    assert [read_bar_code(frame) for frame in reader.frames(file, clip, range(frames))] == list(range(frames))


def test_a_clip_that_changes_its_size_is_refused_at_the_frames_of_another(tmp_path, reader):
    with av.open(str(path := tmp_path / "clip.ts"), "w") as output:
        target = output.add_stream("libx264", rate=25)
        target.height, target.width, target.pix_fmt = 32, 96, "yuv420p"
        for width, start in ((96, 0), (192, 12)):
            write_clip(part := tmp_path / f"{width}.ts", [bar_code(k, width=width) for k in range(12)], options=GROUPS)
            with av.open(str(part)) as source:
                for packet in source.demux(source.streams.video[0]):
                    if packet.size:
                        packet.pts += start * 3600
                        packet.dts += start * 3600
                        packet.stream = target
                        output.mux(packet)
    clip = reader.probe(file := FileImage(str(path)))
    assert (clip.height, clip.width, len(clip.times)) == (32, 96, 24)
    assert read_bar_code(reader.frames(file, clip, [11])[0]) == 11
    with pytest.raises(BrokenVideo, match=naming("clip.ts'", "frame 12", "192 x 32", "96 x 32")):
        reader.frames(file, clip, [11, 12])
