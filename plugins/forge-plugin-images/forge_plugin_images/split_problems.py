"""What cannot be of a dataset's keys for `resize = "split"` and `"longest"`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from forge_core.contracts.errors import Problem
from forge_plugin_images.splitting import most_tiles

if TYPE_CHECKING:
    from forge_plugin_images.source import ImageDataset
    from forge_plugin_vision import ImageFormat, ImageInput

LONGEST = 4
"""Tiles along the longer side where no key sets it, as in Idefics3's processor."""


def tile_size(form: ImageFormat) -> tuple[int, int]:
    """Returns height and width of the images of an encoder with one size."""
    assert form.grid is not None
    # `pixels` first: an encoder may leave out the last pixels, as its patches do not divide the image
    return form.pixels or (form.grid[0] * form.patch, form.grid[1] * form.patch)


def longest_side(source: ImageDataset, seen: ImageInput) -> int:
    """Returns the pixels of the longer side of an image before it is stretched to whole tiles or patches."""
    if source.resize == "longest":
        share, multiple = seen.patches_per_sequence // seen.images_per_sequence, seen.format.multiple
        return source.longest_side or max(math.isqrt(share) // multiple, 1) * multiple * seen.format.patch
    return source.longest_side or LONGEST * max(tile_size(seen.format))


def split_problems(source: ImageDataset, seen: ImageInput) -> Iterator[Problem]:
    """Yields why images cannot be split as the keys say."""
    if source.resize == "longest":
        yield from _longest_problems(source, seen)
        return
    if source.resize != "split":
        if source.longest_side:
            message = f'{source.longest_side} is for resize = "split" and "longest"; set one of them, or leave it out'
            yield Problem("longest_side", message)
        return
    if seen.format.grid is None:
        return
    if source.max_tiles > 1:
        message = f"{source.max_tiles}, but longest_side determines how many tiles an image has"
        yield Problem("max_tiles", f"{message}; take 1 for images that are not cut, or leave it out")
        return
    tile, longest = tile_size(seen.format), longest_side(source, seen)
    # Nothing is cut, so no image needs more room than one tile.
    if source.max_tiles == 1:
        return
    if message := seen.fusion.tile_problem():
        yield Problem("resize", f"'split' makes several images of one, and {message}")
    tiles, whole = most_tiles(tile, longest), int(source.overview != "none")
    for name, one in (("images_per_sequence", 1), ("patches_per_sequence", math.prod(seen.format.grid))):
        if (needed := (tiles + whole) * one) > (room := getattr(seen, name)):
            has = f"a square image becomes {tiles} tiles{' and an overview' if whole else ''} with {longest}"
            message = f"{has}, which need model.vision.{name} = {needed}, and it is {room}"
            yield Problem("longest_side", f"{message}; raise it, or lower longest_side")


def _longest_problems(source: ImageDataset, seen: ImageInput) -> Iterator[Problem]:
    for key in ("max_patches", "min_patches"):
        if value := getattr(source, key):
            yield Problem(key, f'{value}, but with resize = "longest" longest_side bounds images; leave it out')
    if seen.format.grid or seen.format.arrangements:
        return  # `resize` is refused
    longest, multiple = longest_side(source, seen), seen.format.multiple
    patches = (-(-longest // (multiple * seen.format.patch)) * multiple) ** 2
    if patches > seen.patches_per_sequence:
        message = f"a square image of {longest} pixels has {patches} patches"
        room = f"model.vision.patches_per_sequence = {seen.patches_per_sequence}"
        yield Problem("longest_side", f"{message}, and a sequence has {room}; raise it, or lower longest_side")
