"""Clips for tests: frame k carries its number as a bar code, so that a decoded frame can be identified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

BAR = 8
"""Width of a bar in pixels: a block of most codecs, so that it survives compression."""
DARK, LIGHT = 16, 235
TICKS = 1000
"""Ticks of a clip's clock in a second."""


def bar_code(number: int, height: int = 32, width: int = 96) -> np.ndarray:
    """Returns a (height, width, 3) uint8 image of a number.

    Its upper half has a light bar, the number's bits from the highest on, and a dark bar; its lower half has the
    opposite. So an image that is turned or mirrored has no number.

    Raises:
        ValueError: the number has more bits than the width has room for, which is `width / 8 - 2`.
    """
    bars = width // BAR
    if number >> bars - 2:
        raise ValueError(f"{number} does not fit into {bars - 2} bars; make the image wider than {width}")
    bits = [1, *(number >> shift & 1 for shift in reversed(range(bars - 2))), 0]
    row = np.repeat(np.where(bits, LIGHT, DARK).astype(np.uint8), BAR)
    gray = np.concatenate([np.tile(row, (height // 2, 1)), np.tile(DARK + LIGHT - row, (height - height // 2, 1))])
    return np.repeat(gray[..., None], 3, axis=2)


def read_bar_code(image: np.ndarray) -> int:
    """Returns the number of an upright image; -1 if it has none."""
    height, width = image.shape[:2]
    light = image[..., 1].astype(float)
    upper, lower = light[: height // 2].mean(0), light[height // 2 :].mean(0)
    bits = (upper - lower).reshape(width // BAR, BAR).mean(1)
    if min(abs(bits)) < (LIGHT - DARK) / 2 or bits[0] < 0 or bits[-1] > 0:
        return -1
    return int("".join("1" if bit > 0 else "0" for bit in bits[1:-1]), 2)


def write_clip(
    file: Path | BinaryIO,
    images: Sequence[np.ndarray] | int = 24,
    times: Sequence[float] | None = None,
    codec: str = "libx264",
    options: Mapping[str, str] | None = None,
    rotation: int = 0,
    mirrored: Literal["", "rows", "columns"] = "",
    container: str | None = None,
    container_options: Mapping[str, str] | None = None,
) -> None:
    """Encodes a clip.

    Args:
        file: where to write it.
        images: its frames, (height, width, 3) uint8 each, of even sides; or a number of frames with bar codes.
        times: seconds at which each is shown, in thousandths; None: 25 a second.
        codec: name of the encoder in FFmpeg: `libx264`, `libx265`, `mpeg4`, `libvpx-vp9`, `libsvtav1`.
        options: of the encoder, such as `{"g": "12", "bf": "2"}`: a key frame each 12 frames, 2 B-frames in a row.
        rotation: degrees by which the file's metadata ask a player to turn the frames counter-clockwise.
        mirrored: what they ask to be reversed.
        container: such as `mp4`; None: by the file's name.
        container_options: such as `{"movflags": "faststart"}`.
    """
    import av

    pictures = [bar_code(number) for number in range(images)] if isinstance(images, int) else images
    shown = [round(time * TICKS) for time in times] if times is not None else range(0, 40 * len(pictures), 40)
    with av.open(
        file if hasattr(file, "write") else str(file), "w", format=container, options=dict(container_options or {})
    ) as output:
        stream: Any = output.add_stream(codec, rate=25, options=dict(options or {}))
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = stream.time_base = Fraction(1, TICKS)
        stream.codec_context.thread_count = 1
        if rotation or mirrored:
            stream.set_display_rotation(rotation, hflip=mirrored == "columns", vflip=mirrored == "rows")
        for picture, tick in zip(pictures, shown, strict=True):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture))
            frame.pts, frame.time_base = tick, Fraction(1, TICKS)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
