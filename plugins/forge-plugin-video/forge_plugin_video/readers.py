"""The video readers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from forge_plugin_images.decoding import FileImage, ImageFile
from forge_plugin_video.kinds import BrokenVideo, Clip, VideoReader, VideoReaderComponent

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream


@frozen(kw_only=True)
class PyAV(VideoReaderComponent):
    """Reads with PyAV, whose wheel brings FFmpeg and its decoders; one thread for each worker."""

    def build(self) -> VideoReader:
        return PyAVReader()


@frozen
class PyAVReader:
    """A `VideoReader` by PyAV."""

    def probe(self, file: ImageFile) -> Clip:
        """See `VideoReader`. Reads the clip's packets, and decodes its first frame for its size and rotation."""
        with _opened(file) as (container, stream):
            packets = [packet for packet in container.demux(stream) if packet.size and not packet.is_discard]
            stamps = np.array([packet.pts for packet in packets if packet.pts is not None], dtype=np.int64)
            if len(stamps) < len(packets):
                raise _Unreadable("its packets have no times; write it into another container, such as mp4")
            order = np.argsort(stamps, kind="stable")
            keys = np.array([packet.is_keyframe for packet in packets], dtype=bool)[order]
            if not keys.any():
                raise _Unreadable("no key frame, at which decoding could start" if packets else "no frames")
            first = int(keys.argmax())  # no decoder shows what precedes the first key frame
            times = _seconds(stamps[order][first:], stream)
            step = _seconds(np.array([packets[order[-1]].duration or 0]), stream)[0] or _usual_step(times, stream)
            container.seek(int(stamps[order][first]), stream=stream)
            height, width = _upright(next(container.decode(stream))).shape[:2]
            return Clip(height, width, times, keys[first:], float(times[-1] + step - times[0]))

    def frames(self, file: ImageFile, clip: Clip, numbers: Sequence[int]) -> list[np.ndarray]:
        """See `VideoReader`."""
        wanted = sorted(set(numbers))
        found: dict[int, np.ndarray] = {}
        with _opened(file) as (container, stream):
            for start, group in _groups(clip, wanted):
                container.seek(_stamp(clip.times[start], stream), stream=stream)
                found.update(_decoded(container, stream, clip, group))
        missing = [number for number in wanted if number not in found]
        if missing:
            number = missing[0]
            raise BrokenVideo(file.name, f"frame {number} at {clip.times[number]:.3f} s cannot be decoded")
        return [found[number] for number in numbers]


class _Unreadable(Exception):
    """Why a clip cannot be read; its name is added where it is known."""


@contextmanager
def _opened(file: ImageFile) -> Iterator[tuple[InputContainer, VideoStream]]:
    import av

    # Decoders raise whatever a damaged file leads them to: av's errors, ValueError, UnicodeDecodeError, …
    try:
        if isinstance(file, FileImage):  # FFmpeg reads a file itself faster than through Python
            with av.open(f"file:{file.name}", "r") as container:
                yield container, _video_stream(container)
        else:
            with file.open() as data, av.open(data, "r") as container:
                yield container, _video_stream(container)
    except BrokenVideo:
        raise
    except _Unreadable as error:
        raise BrokenVideo(file.name, str(error)) from error
    except Exception as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise BrokenVideo(file.name, reason) from error


def _video_stream(container: InputContainer) -> VideoStream:
    from av.stream import Disposition

    # The cover of a song is a video stream to FFmpeg
    videos = (stream for stream in container.streams.video if not stream.disposition & Disposition.attached_pic)
    stream = next(videos, None)
    if stream is None:
        streams = ", ".join(sorted({stream.type for stream in container.streams})) or "none"
        raise _Unreadable(f"no video stream; its streams: {streams}; audio is left out")
    stream.thread_count = 1
    return stream


def _groups(clip: Clip, wanted: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yields key frames to seek to, each with the wanted frames that are decoded from there on."""
    keys = np.flatnonzero(clip.keys)
    starts = keys[np.searchsorted(keys, wanted, side="right") - 1]
    start = -1
    group: list[int] = []
    for key, number in zip(starts.tolist(), wanted, strict=True):
        if group and key > group[-1] + 1:
            yield start, group
            group = []
        if not group:
            start = key
        group.append(number)
    if group:
        yield start, group


def _decoded(
    container: InputContainer, stream: VideoStream, clip: Clip, group: Sequence[int]
) -> Iterator[tuple[int, np.ndarray]]:
    numbers = {_stamp(clip.times[number], stream): number for number in group}
    last = max(numbers)
    for frame in container.decode(stream):
        if frame.pts in numbers:
            yield numbers[frame.pts], _upright(frame)
        if frame.pts is not None and frame.pts >= last:
            return


def _upright(frame: VideoFrame) -> np.ndarray:
    pixels = frame.to_ndarray(format="rgb24")
    return np.ascontiguousarray(np.rot90(pixels, frame.rotation // 90)) if frame.rotation else pixels


def _seconds(stamps: np.ndarray, stream: VideoStream) -> np.ndarray:
    assert stream.time_base is not None
    return stamps.astype(np.float64) * stream.time_base.numerator / stream.time_base.denominator


def _stamp(seconds: float, stream: VideoStream) -> int:
    assert stream.time_base is not None
    return round(seconds * stream.time_base.denominator / stream.time_base.numerator)


def _usual_step(times: np.ndarray, stream: VideoStream) -> float:
    """Seconds that the last frame stands, where the file does not say."""
    if len(times) > 1:
        return float(np.median(np.diff(times)))
    return float(1 / stream.guessed_rate) if stream.guessed_rate else 0.0
