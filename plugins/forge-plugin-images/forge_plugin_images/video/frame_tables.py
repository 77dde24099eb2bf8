"""Tables of the frames in a container, read before any frame is decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from forge_plugin_images.video.kinds import Clip, Unreadable
from forge_plugin_images.video.mp4_tables import read_track
from forge_plugin_images.video.orientation import Turn

if TYPE_CHECKING:
    from typing import BinaryIO

    from av.container import InputContainer
    from av.video.stream import VideoStream


class Frames(NamedTuple):
    """Tables of a clip's frames in the order in which they are shown; T frames."""

    stamps: np.ndarray
    """(T,) int64: when each is shown, in ticks of the stream's clock."""
    keys: np.ndarray
    """(T,) bool."""
    unseen: np.ndarray
    """(T,) bool: frames that only others need, cut off by the file's edit list."""
    ends: np.ndarray
    """(T,) int64: ticks until which each is shown; equal to `stamps` where the container has no duration."""

    @classmethod
    def sorted(cls, *columns: np.ndarray) -> Frames:
        """Returns the tables of frames in any order."""
        order = np.argsort(columns[0], kind="stable")
        return cls(*(column[order] for column in columns))


def clip_of(frames: Frames, stream: VideoStream, turn: Turn, max_duration: float) -> Clip:
    """Returns the clip that the tables describe.

    Raises:
        Unreadable: there is nothing to decode, or too much.
    """
    if not len(frames.stamps):
        raise Unreadable("no frames")
    if not frames.keys.any():
        raise Unreadable("no key frame, at which decoding could start")
    # No decoder shows what precedes the first key frame. That one may be unseen: then the first frame starts before it.
    shown = ~frames.unseen & (np.arange(len(frames.keys)) >= frames.keys.argmax())
    times, keys = seconds(frames.stamps[shown], stream), frames.keys[shown]
    if not len(times):
        raise Unreadable("its edit list leaves no frame")
    # Decoding starts at the unseen key frame before it, or at itself.
    keys[0] = True
    if (np.diff(times) <= 0).any():
        raise Unreadable("two frames have the same time; rewrite its times")
    end = seconds(frames.ends[shown], stream)[-1]
    if end <= times[-1]:
        # The median: gaps in a recording do not lengthen its last frame.
        end = times[-1] + (np.median(np.diff(times)) if len(times) > 1 else _usual_step(stream))
    duration = float(end - times[0])
    if duration > max_duration:
        message = f"it takes {duration:,.0f} s, more than max_duration {max_duration:,.0f}"
        raise Unreadable(f"{message}; cut it into parts, or raise max_duration of its reader")
    height, width = turn.size(stream.height, stream.width)
    return Clip(height, width, times, keys, duration)


def frames_by_index(data: BinaryIO, container: InputContainer, stream: VideoStream) -> tuple[Frames, Turn] | None:
    """Returns the tables by the header of an MP4 or QuickTime file; None where it has none that are complete.

    FFmpeg's index obeys the file's edit lists. Its times are decoding times.

    Raises:
        Unreadable: the file ends before its last frame.
    """
    track = read_track(data, stream.id)
    count = len(stream.index_entries)
    if track is None or not count or not len(track.offsets) == len(track.durations) == count:
        return None
    entries = [(e.timestamp, e.is_keyframe, e.is_discard, e.pos + e.size) for e in stream.index_entries]
    decoded, keys, unseen, ends = (np.array(column) for column in zip(*entries, strict=True))
    if ends.max() > container.size > 0:
        raise Unreadable(f"truncated: it has {container.size:,} bytes, and its header names {ends.max():,}")
    stamps = decoded + track.offsets
    # FFmpeg may shift all times by a constant, that no frame be shown before it is decoded
    packet = next(packet for packet in container.demux(stream) if packet.size)
    # The shift can only be computed if the first packet is the first entry of the index
    if packet.pts is None or packet.dts != decoded[0]:
        return None
    stamps += packet.pts - stamps[0]
    return Frames.sorted(stamps, keys, unseen, stamps + track.durations), Turn.of(track.matrix)


def frames_by_packets(container: InputContainer, stream: VideoStream) -> Frames:
    """Returns the tables by reading all packets, and decoding none.

    Raises:
        Unreadable: the packets have no times.
    """
    packets = [packet for packet in container.demux(stream) if packet.size]
    stamps = np.array([packet.pts for packet in packets if packet.pts is not None], dtype=np.int64)
    if len(stamps) < len(packets):
        raise Unreadable("its packets have no times; write it into another container, such as mp4")
    flags = [[packet.is_keyframe, packet.is_discard] for packet in packets]
    keys, unseen = np.array(flags, dtype=bool).reshape(-1, 2).T
    return Frames.sorted(stamps, keys, unseen, stamps + [packet.duration or 0 for packet in packets])


def seconds(stamps: np.ndarray, stream: VideoStream) -> np.ndarray:
    """Returns times in seconds, as the `time` of PyAV's frames."""
    assert stream.time_base is not None
    return stamps.astype(np.float64) * stream.time_base.numerator / stream.time_base.denominator


def ticks(time: float, stream: VideoStream) -> int:
    """Returns a time in ticks of the stream's clock."""
    assert stream.time_base is not None
    return round(time * stream.time_base.denominator / stream.time_base.numerator)


def _usual_step(stream: VideoStream) -> float:
    """Seconds that an only frame stands, where the container does not say."""
    return float(1 / stream.guessed_rate) if stream.guessed_rate else 0.0
