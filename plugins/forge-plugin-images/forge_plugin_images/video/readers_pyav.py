"""Reads clips with PyAV."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from attrs import define, field

from forge_plugin_images.decoding import FileImage
from forge_plugin_images.image_file import ImageFile
from forge_plugin_images.video.frame_tables import clip_of, frames_by_index, frames_by_packets, ticks
from forge_plugin_images.video.kinds import BrokenVideo, Clip, Unreadable
from forge_plugin_images.video.mp4_tables import truncation
from forge_plugin_images.video.orientation import Turn

if TYPE_CHECKING:
    from av import Packet, VideoFrame
    from av.container import InputContainer
    from av.video.reformatter import VideoReformatter
    from av.video.stream import VideoStream

SKIPS_EXACTLY = ("h264", "mpeg4", "mpeg2video")
"""Codecs in which a frame that is marked as no reference is needed for no other, so that it can be left out."""

MARGIN = 10.0
"""Seconds before its first frame to which a clip is rewound."""


@define
class PyAVReader:
    """A `VideoReader` by PyAV, in one thread."""

    max_duration: float
    decoded: int = field(default=0, init=False)
    """Frames that were decoded until now, wanted or not."""

    def probe(self, file: ImageFile) -> Clip:
        """See `VideoReader`. Where the header has no index of all frames, it decodes the first, for its rotation."""
        with opened(file) as (container, stream, data):
            indexed = frames_by_index(data, container, stream)
            if indexed is not None:
                return clip_of(indexed[0], stream, indexed[1], self.max_duration)
        # Opened again: looking for an index has read the first packet already
        with opened(file) as (container, stream, _):
            frames = frames_by_packets(container, stream)
            clip = clip_of(frames, stream, Turn(), self.max_duration)
            [frame] = self._decode(container, stream, clip, [0])
            return clip_of(frames, stream, _turn(frame), self.max_duration)

    def frames(self, file: ImageFile, clip: Clip, numbers: Sequence[int]) -> list[np.ndarray]:
        """See `VideoReader`."""
        from av.video.reformatter import VideoReformatter

        wanted = sorted(set(numbers))
        with opened(file) as (container, stream, _):
            reformatter = VideoReformatter()  # of all frames: setting one up takes as long as using it
            decoded = self._decode(container, stream, clip, wanted)
            found = {number: _pixels(frame, reformatter) for number, frame in zip(wanted, decoded, strict=True)}
            for number, pixels in found.items():
                if pixels.shape[:2] != clip[:2]:
                    here, there = (f"{width} x {height}" for height, width in (clip[:2], pixels.shape[:2]))
                    raise Unreadable(f"{_name(clip, number)} has {there} pixels and not {here}; cut the clip there")
        return [found[number] for number in numbers]

    def _decode(
        self, container: InputContainer, stream: VideoStream, clip: Clip, wanted: Sequence[int]
    ) -> Iterator[VideoFrame]:
        """Yields the wanted frames, whose numbers ascend."""
        keys = np.flatnonzero(clip.keys)
        for group in _groups(keys, wanted):
            found: dict[int, VideoFrame] = {}
            # Later starts decode more frames, and only a few containers and codecs need them
            for seek, start in _starts(clip, keys, group[0]):
                found = self._decode_from(container, stream, clip, (seek, start), group)
                if len(found) == len(group):
                    break
            for number in group:
                if number not in found:
                    raise Unreadable(f"{_name(clip, number)} is damaged or missing")
                yield found[number]

    def _decode_from(
        self,
        container: InputContainer,
        stream: VideoStream,
        clip: Clip,
        start: tuple[float, float],
        group: Sequence[int],
    ) -> dict[int, VideoFrame]:
        """Returns the wanted frames that are decoded intact when decoding starts at `start`.

        Args:
            container: the clip's.
            stream: likewise.
            clip: the clip.
            start: seconds to seek to, and of the key frame to start at.
            group: numbers of wanted frames, ascending.
        """
        numbers = {ticks(clip.times[number], stream): number for number in group}
        last, shown, is_damaged = max(numbers), -math.inf, False
        found: dict[int, VideoFrame] = {}
        for frame in _frames_from(container, stream, [ticks(time, stream) for time in start], numbers):
            self.decoded += 1
            if frame.pts is None or frame.pts < shown:
                raise Unreadable("its times are not those at which frames are shown; write it into mp4 or mkv")
            shown = frame.pts
            is_damaged = frame.is_corrupt or (is_damaged and not frame.key_frame)  # others were predicted from it
            if shown in numbers and not is_damaged:
                found[numbers[shown]] = frame
            if shown >= last:
                break
        return found


def _frames_from(
    container: InputContainer, stream: VideoStream, start: Sequence[int], wanted: Iterable[int]
) -> Iterator[VideoFrame]:
    """Yields frames from a key frame to the last wanted one, without unwanted ones that no other needs."""
    from av.error import InvalidDataError

    container.seek(start[0], stream=stream)
    packets = (packet for packet in container.demux(stream) if packet.size)
    first = _first(packets, *start)
    if first is None:
        return
    left, decoder = set(wanted), stream.codec_context
    may_skip = _may_skip(stream)
    for packet in chain([first], packets):
        if may_skip:
            decoder.skip_frame = "DEFAULT" if packet.pts in left else "NONREF"
        try:
            yield from packet.decode()
        except InvalidDataError:  # the missing frame is then reported with its time
            return
        left.discard(packet.pts)
        if not left:
            break
    # A decoder holds frames back until later ones tell their order: draining it is cheaper than decoding those
    yield from stream.decode(None)


def _may_skip(stream: VideoStream) -> bool:
    """Returns whether the decoder can skip frames that are marked as non-reference without changing any other frame.

    In HEVC such a frame is a non-reference frame only within its own temporal layer (ITU-T H.265, 7.4.2.2); if the
    header declares a single layer (ISO/IEC 14496-15, 8.3.2.1), this covers all frames.
    """
    decoder = stream.codec_context
    if decoder.name != "hevc":
        return decoder.name in SKIPS_EXACTLY
    header = decoder.extradata or b""
    return len(header) > 21 and header[0] == 1 and header[21] >> 3 & 7 == 1


def _first(packets: Iterable[Packet], seek: int, key: int) -> Packet | None:
    """Returns the packet to start at; None if the seek ended behind it.

    What comes before a key frame decodes to noise, if at all. Right after a seek to it, the key frame may also be one
    before `key`, which the file's edit list has cut off.
    """
    for packet in packets:
        if packet.is_keyframe and packet.pts is not None and (seek == key or packet.pts >= key):
            return packet if packet.pts <= key else None
    return None


def _starts(clip: Clip, keys: np.ndarray, number: int) -> Iterator[tuple[float, float]]:
    """Yields seconds to seek to and seconds of the key frame to start at, for a wanted frame, best first."""
    last = int(np.searchsorted(keys, number, side="right")) - 1
    key = clip.times[keys[last]]
    earlier = clip.times[keys[last - 1]] if last else key - MARGIN
    yield key, key
    yield earlier, key  # a container that is searched by times of decoding may end behind the key frame
    if last:
        yield earlier, earlier  # from some key frames on, decoders need further frames to recover


def _groups(keys: np.ndarray, wanted: Sequence[int]) -> Iterator[list[int]]:
    """Yields wanted frames that are decoded in one go: no frames could be left out between them by another seek."""
    group: list[int] = []
    for number in wanted:
        key = keys[np.searchsorted(keys, number, side="right") - 1]
        if group and key > group[-1] + 1:
            yield group
            group = []
        group.append(number)
    if group:
        yield group


@contextmanager
def opened(file: ImageFile) -> Iterator[tuple[InputContainer, VideoStream, BinaryIO]]:
    """Opens a clip: its container, its video stream, and the file itself for what PyAV does not hand on.

    Raises:
        BrokenVideo: it cannot be opened, or the code inside the context fails.
    """
    import av

    # Decoders raise whatever a damaged file leads them to: av's errors, ValueError, UnicodeDecodeError, …
    try:
        with file.open() as header, file.open() as data:
            if not header.read(1):
                raise Unreadable("the file is empty")
            # FFmpeg reads a file itself faster than through Python
            with av.open(f"file:{file.name}" if isinstance(file, FileImage) else data, "r") as container:
                yield container, _video_stream(container, header), header
    except BrokenVideo:
        raise
    except Unreadable as error:
        raise BrokenVideo(file.name, str(error)) from error
    except EOFError as error:
        raise BrokenVideo(file.name, "the file ends before its first frame") from error
    except Exception as error:
        reason = _cut_off(file) or getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise BrokenVideo(file.name, reason) from error


def _cut_off(file: ImageFile) -> str:
    """Returns how a file is truncated, which FFmpeg's error seldom shows; empty if it is not, or cannot be opened."""
    try:
        with file.open() as data:
            return truncation(data)
    except OSError:
        return ""


def _video_stream(container: InputContainer, data: BinaryIO) -> VideoStream:
    from av.stream import Disposition

    # The cover of a song is a video stream to FFmpeg
    videos = (stream for stream in container.streams.video if not stream.disposition & Disposition.attached_pic)
    stream = next(videos, None)
    if stream is None:
        streams = ", ".join(sorted({stream.type for stream in container.streams})) or "none"
        raise Unreadable(truncation(data) or f"no video stream; its streams: {streams}; audio is left out")
    stream.thread_count = 1  # a worker has a core
    return stream


def _turn(frame: VideoFrame) -> Turn:
    matrix: Any = frame.side_data.get("DISPLAYMATRIX")
    return Turn() if matrix is None else Turn.of(np.frombuffer(matrix, np.int32)[[0, 1, 3, 4]].reshape(2, 2))


def _pixels(frame: VideoFrame, reformatter: VideoReformatter) -> np.ndarray:
    # By default, each worker would use as many threads for the conversion as the whole machine has
    pixels = reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
    turn = _turn(frame)
    return pixels if turn == Turn() else turn.upright(pixels)


def _name(clip: Clip, number: int) -> str:
    return f"frame {number} at {clip.times[number]:.3f} s"
