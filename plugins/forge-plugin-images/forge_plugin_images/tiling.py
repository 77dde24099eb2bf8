"""Tiles of an image (any-res): images of the encoder's size that together show it at a higher resolution."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

from PIL import Image


@cache
def tile_grids(most: int) -> tuple[tuple[int, int], ...]:
    """Returns rows and columns of all grids of at most `most` tiles.

    These are Llama 3.2 Vision's (`get_all_supported_aspect_ratios`), and among them all of LLaVA-NeXT's.
    """
    # In the order of that function, whose pairs are (width, height) by its docstring. Its processor takes its pairs
    # for (height, width), and numbers arrangements so: an encoder that looks up a number has its own list
    # (`ImageFormat.arrangements`, rows and columns). Here the order only decides between equals.
    return tuple((rows, columns) for columns in range(1, most + 1) for rows in range(1, most // columns + 1))


def tile_grid(size: tuple[int, int], tile: tuple[int, int], most: int) -> tuple[int, int]:
    """Returns the best rows and columns of at most `most` tiles; see `best_tiles`."""
    return best_tiles(size, tile, tile_grids(most))


def best_tiles(
    size: tuple[int, int], tile: tuple[int, int], arrangements: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Returns the rows and columns of tiles that keep most of an image's resolution, and among those waste least.

    This is LLaVA-NeXT's `select_best_resolution` (Liu et al. 2024).

    Args:
        size: height and width of the image in pixels.
        tile: height and width of a tile in pixels.
        arrangements: rows and columns to choose from.
    """
    (height, width), area = size, size[0] * size[1]

    def merit(grid: tuple[int, int]) -> tuple[int, int]:
        canvas = grid[0] * tile[0], grid[1] * tile[1]
        scale = min(canvas[1] / width, canvas[0] / height)
        shown = min(int(width * scale) * int(height * scale), area)  # enlarging adds no detail
        return shown, shown - canvas[0] * canvas[1]

    return max(arrangements, key=merit)  # the first of equals


def shown_part(size: tuple[int, int], rows: int, columns: int) -> tuple[int, int]:
    """Returns how many rows and columns in the middle of a canvas show an image that is resized to fit into it.

    As many are left out above as below, and left as right, so one that is partly filled may remain. This is
    `unpad_image` of LLaVA-NeXT, whose roundings matter.

    Args:
        size: height and width of the image in pixels.
        rows: of the canvas, in patches.
        columns: of the canvas, in patches.
    """
    height, width = size
    if width / height > columns / rows:
        # Rounded before it is truncated: floating point may be just below a whole number
        filled = int(round(height * (columns / width), 7))
        return rows - (rows - filled) // 2 * 2, columns
    filled = int(round(width * (rows / height), 7))
    return rows, columns - (columns - filled) // 2 * 2


def canvas_of(size: tuple[int, int], tile: int, arrangements: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Returns the rows and columns of tiles that suit an image best.

    Those in which it is enlarged least; if it is larger than all of them, those in which it is shrunk least. Of equals,
    the fewest tiles. This is `get_optimal_tiled_canvas` of Llama 3.2 Vision.

    Args:
        size: height and width of the image in pixels.
        tile: side of a tile in pixels.
        arrangements: rows and columns to choose from.
    """

    def merit(tiles: tuple[int, int]) -> tuple[bool, float, int]:
        scale = min(side * tile / own for side, own in zip(tiles, size, strict=True))
        return scale < 1, scale if scale >= 1 else -scale, math.prod(tiles)

    return min(arrangements, key=merit)  # the first of equals


def fitted_size(size: tuple[int, int], canvas: tuple[int, int], tile: int) -> tuple[int, int]:
    """Returns the height and width of an image on its canvas: within it, and not enlarged beyond a tile.

    This is `get_image_size_fit_to_canvas` of Llama 3.2 Vision, whose roundings matter.
    """
    most_height, most_width = (min(max(own, tile), side) for own, side in zip(size, canvas, strict=True))
    across, down = most_width / size[1], most_height / size[0]
    if across < down:
        return min(math.floor(size[0] * across) or 1, most_height), most_width
    return most_height, min(math.floor(size[1] * down) or 1, most_width)


def tiles_of(
    image: Image.Image, rows: int, columns: int, tile: tuple[int, int], resampling: Image.Resampling
) -> Iterator[Image.Image]:
    """Yields the tiles of an image row by row: it is resized to fit into all of them together, in the middle of black.

    Args:
        image: the image.
        rows: tiles below each other.
        columns: tiles beside each other.
        tile: height and width of a tile in pixels.
        resampling: how pixels are interpolated.
    """
    height, width = rows * tile[0], columns * tile[1]
    across, down = width / image.width, height / image.height
    # The longer side fits exactly; the other is rounded up, as in LLaVA-NeXT.
    if across < down:
        fitted = width, min(math.ceil(image.height * across), height)
    else:
        fitted = min(math.ceil(image.width * down), width), height
    canvas = Image.new(image.mode, (width, height))  # black
    canvas.paste(image.resize(fitted, resampling), ((width - fitted[0]) // 2, (height - fitted[1]) // 2))
    for top in range(0, height, tile[0]):
        for left in range(0, width, tile[1]):
            yield canvas.crop((left, top, left + tile[1], top + tile[0]))
