"""Splitting: an image is stretched to whole tiles, which then are cut out of it; `tiling` has those with bars instead.

In Idefics3 and SmolVLM, an image is resized up to three times (its longer side; to whole tiles; the overview of that),
and the roundings of each matter. In InternVL, the grid is the one whose shape is nearest to the image's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from PIL import Image

LARGEST = 4096
"""Pixels of the longer side at most."""

Size = tuple[int, int]
"""Height and width in pixels."""


def with_longest_side(size: Size, longest: int) -> Size:
    """Returns the size whose longer side has `longest` pixels, and whose other is even, rounded up.

    This is `get_resize_output_image_size` of Idefics3, for a longest side within `LARGEST`.
    """
    height, width = size
    ratio = width / height
    if width >= height:
        # Truncated before it becomes even: the order of the reference
        shorter = int(longest / ratio)
        return max(shorter + shorter % 2, 1), longest
    shorter = int(longest * ratio)
    return longest, max(shorter + shorter % 2, 1)


def whole_tiles(size: Size, tile: Size) -> tuple[int, int]:
    """Returns the rows and columns of tiles to which an image is stretched (`resize_for_vision_encoder`)."""
    height, width = size
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / tile[1])
        return math.ceil(int(columns * tile[1] / ratio) / tile[0]), columns
    rows = math.ceil(height / tile[0])
    return rows, math.ceil(int(rows * tile[0] * ratio) / tile[1])


def split_grid(size: Size, tile: Size, longest: int) -> tuple[int, int]:
    """Returns rows and columns of the tiles of an image: (1, 1) if it is seen whole, without an overview."""
    return whole_tiles(with_longest_side(size, longest), tile)


def most_tiles(tile: Size, longest: int) -> int:
    """Returns the maximum number of tiles of an image: the tiles of a square image."""
    return math.prod(split_grid((1, 1), tile, longest))


def split_image(
    image: Image.Image, tile: Size, longest: int, resampling: Image.Resampling
) -> tuple[list[Image.Image], Image.Image]:
    """Returns the tiles of an image row by row, and its overview, all of the size of a tile.

    Args:
        image: the image, in RGB.
        tile: height and width of a tile.
        longest: pixels of the longer side before it is stretched to whole tiles.
        resampling: how pixels are interpolated.
    """
    rows, columns = split_grid((image.height, image.width), tile, longest)
    whole = resized_to_longest(image, longest, resampling).resize((columns * tile[1], rows * tile[0]), resampling)
    # Of the stretched image and not of the original, as in Idefics3: pixels differ.
    overview = whole.resize((tile[1], tile[0]), resampling)
    return list(_cut(whole, tile)), overview


def nearest_shape(size: Size, tile: Size, most: int) -> tuple[int, int]:
    """Returns rows and columns of at most `most` tiles, whose width by height in tiles is nearest to the image's.

    Of equals that with more tiles, as long as the image has more than half of their pixels. This is
    `get_optimal_tiled_canvas` of InternVL's processor.
    """
    height, width = size
    pairs = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most + 1) if rows * columns <= most]
    best, difference = (1, 1), math.inf
    # Fewest tiles first; the sort is stable, so equals keep the order of the reference.
    for rows, columns in sorted(pairs, key=math.prod):
        own = abs(width / height - columns / rows)
        has_enough = width * height > 0.5 * tile[0] * tile[1] * columns * rows
        if own < difference or (own == difference and has_enough):
            best, difference = (rows, columns), own
    return best


def stretched_tiles(
    image: Image.Image, grid: tuple[int, int], tile: Size, resampling: Image.Resampling
) -> list[Image.Image]:
    """Returns the tiles of an image that is stretched to all of them, row by row."""
    return list(_cut(image.resize((grid[1] * tile[1], grid[0] * tile[0]), resampling), tile))


def resized_to_longest(image: Image.Image, longest: int, resampling: Image.Resampling) -> Image.Image:
    """Returns an image whose longer side has `longest` pixels."""
    height, width = with_longest_side((image.height, image.width), longest)
    return image.resize((width, height), resampling)


def _cut(image: Image.Image, tile: Size) -> Iterator[Image.Image]:
    for top in range(0, image.height, tile[0]):
        for left in range(0, image.width, tile[1]):
            yield image.crop((left, top, left + tile[1], top + tile[0]))
