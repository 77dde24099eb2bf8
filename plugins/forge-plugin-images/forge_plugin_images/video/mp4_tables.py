"""Properties of a video track in an MP4 file that PyAV does not expose: durations, composition offsets and rotation.

Boxes are defined in ISO/IEC 14496-12. FFmpeg's index of such a file contains the time at which each frame is decoded;
if frames are not decoded in the order in which they are shown, the box `ctts` contains the differences. Reading it
costs only the header's bytes, whereas reading the packets costs the bytes of the whole clip.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

LARGEST_HEADER = 1 << 28
"""Bytes of a `moov` box above which a file is taken to be damaged: a clip of ten hours has less than 20 MB."""
FIRST = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
"""Boxes that a file begins with."""
Boxes = dict[bytes, list[memoryview]]


class Track(NamedTuple):
    """Tables of a video track; frames in the order of decoding."""

    durations: np.ndarray
    """(frames,) int64 ticks from each frame's decoding to the next."""
    offsets: np.ndarray
    """(frames,) int64 ticks from each frame's decoding to its showing."""
    matrix: np.ndarray
    """(2, 2) float64: see `Turn.of`."""


def read_track(data: BinaryIO, number: int) -> Track | None:
    """Returns the tables of the track with this number; None if the file is no MP4, a fragmented one, or damaged there.

    Args:
        data: the file, read from its beginning.
        number: as the file's own, which FFmpeg hands on as a stream's `id`.
    """
    header = _header(data)
    try:
        return None if header is None else _track(_boxes(header), number)
    except (LookupError, ValueError):  # FFmpeg repairs some of what it reads; its packets have the same times
        return None


def truncation(data: BinaryIO) -> str:
    """Returns how an MP4 or QuickTime file is cut off, by the sizes of its boxes; empty if it is not, or is another."""
    end, at, has_header = data.seek(0, io.SEEK_END), 0, False
    while at < end:
        data.seek(at)
        head = data.read(16)
        size, name = int.from_bytes(head[:4]), head[4:8]
        if at == 0 and name not in FIRST:
            return ""
        if size == 1:  # of 64 bits
            size = int.from_bytes(head[8:16])
        if at + max(size, 8) > end:
            return f"truncated: it has {end:,} bytes, and its boxes name {at + size:,}"
        has_header = has_header or name in (b"moov", b"moof")
        at = at + size if size >= 8 else end  # 0: up to the end of the file
    return "it has no header (moov): it was cut off, or its recording not finished" if end and not has_header else ""


def _track(movie: Boxes, number: int) -> Track | None:
    if b"mvex" in movie or b"mvhd" not in movie:  # the tables of fragments are spread over the file
        return None
    for track in map(_boxes, movie.get(b"trak", ())):
        head = track[b"tkhd"][0]
        is_long = head[0] == 1  # times of 64 bits
        # Offsets of track_ID and matrix in `tkhd` (8.3.2), and of the matrix from the end of `mvhd` (8.2.2)
        if int.from_bytes(head[20 if is_long else 12 :][:4]) == number:
            matrix = _matrix(head[52 if is_long else 40 :]) @ _matrix(movie[b"mvhd"][0][-64:])
            return Track(*_times(track), matrix)
    return None


def _header(data: BinaryIO) -> memoryview | None:
    """Returns the box `moov`, wherever in the file it is."""
    at = 0
    while True:
        data.seek(at)
        head = data.read(16)
        size, name = int.from_bytes(head[:4]), head[4:8]
        if at == 0 and name not in FIRST:
            return None
        start = 8
        if size == 1:  # of 64 bits
            size, start = int.from_bytes(head[8:16]), 16
        if name == b"moov" and size <= LARGEST_HEADER:
            data.seek(at + start)
            return memoryview(data.read(size - start))
        if size < 8 or name == b"moov":  # 0: up to the end of the file
            return None
        at += size


def _boxes(content: memoryview) -> Boxes:
    found: Boxes = {}
    for name, body in _walk(content):
        found.setdefault(name, []).append(body)
    return found


def _walk(content: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    at = 0
    while at + 8 <= len(content):
        size = int.from_bytes(content[at : at + 4])
        # Damage, or a size of 64 bits, which tables do not need; the caller reads packets if one is missing then
        if size < 8:
            return
        yield bytes(content[at + 4 : at + 8]), content[at + 8 : at + size]
        at += size


def _matrix(content: memoryview) -> np.ndarray:
    # Fixed point, 16.16. The third value of a row concerns perspective, and is left out.
    values = np.frombuffer(content[:20], ">i4").astype(np.float64) / 2**16
    return values[[0, 1, 3, 4]].reshape(2, 2)


def _times(track: Boxes) -> tuple[np.ndarray, np.ndarray]:
    table = track
    for name in (b"mdia", b"minf", b"stbl"):
        table = _boxes(table[name][0])
    durations = _runs(table[b"stts"][0])
    return durations, _runs(table[b"ctts"][0]) if b"ctts" in table else np.zeros_like(durations)


def _runs(content: memoryview) -> np.ndarray:
    """Returns one number for each frame, of a table of runs (count, number)."""
    # Signed in both versions of `ctts`, as FFmpeg reads it: QuickTime writes negative offsets into version 0
    runs = np.frombuffer(content[8:], ">i4").reshape(-1, 2).astype(np.int64)
    return np.repeat(runs[:, 1], runs[:, 0])
