"""Heat maps as PNG images of one pixel a cell: a table of 58 layers by 256 experts takes 10 kB instead of 600.

Colours are transparent towards the middle, so that one image suits light and dark pages.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from forge_kit.tools.report_sections import HeatMap

BELOW, ABOVE = (37, 99, 235), (214, 40, 40)
LEVELS = 120
"""Levels of a colour on either side of the middle: level 0 is empty, 128 the middle."""
MIDDLE = 128


def levels_of(heat_map: HeatMap) -> np.ndarray:
    """Returns the cells as levels, rows x longest row."""
    width = max((len(row) for row in heat_map.values), default=0)
    levels = np.zeros((len(heat_map.values), max(1, width)), np.uint8)
    for number, row in enumerate(heat_map.values):
        levels[number, : len(row)] = [_level(value, heat_map) for value in row]
    return levels


def image_of(heat_map: HeatMap) -> str:
    """Returns the image as a data URL."""
    levels = levels_of(heat_map)
    palette, alpha = bytearray(), bytearray()
    for level in range(256):
        # Level 0 is a cell without a value, and stays empty
        strength = min(LEVELS, abs(level - MIDDLE)) / LEVELS if level else 0.0
        palette += bytes(ABOVE if level >= MIDDLE else BELOW)
        alpha.append(round(255 * strength))
    height, width = levels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in levels)  # filter 0: none
    chunks = [
        # 8 bits a pixel and colour type 3: indices into the palette PLTE, with opacities in tRNS
        _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        _chunk(b"PLTE", bytes(palette)),
        _chunk(b"tRNS", bytes(alpha)),
        _chunk(b"IDAT", zlib.compress(rows, 9)),
        _chunk(b"IEND", b""),
    ]
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _level(value: float, heat_map: HeatMap) -> int:
    if not math.isfinite(value):
        return 0
    share = (value - heat_map.middle) / heat_map.reach if heat_map.reach else 0.0
    return MIDDLE + round(LEVELS * max(-1.0, min(1.0, share)))


def extremes_of(values: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Returns the least and the largest finite value; (0, 0) without any."""
    finite = [value for row in values for value in row if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (0.0, 0.0)
