"""Why the resize keys of an image dataset do not fit a model's encoder and adapter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from forge_core.contracts.errors import Problem
from forge_plugin_images.split_problems import split_problems
from forge_plugin_images.tile_text import feature_sides
from forge_plugin_vision import Grid

if TYPE_CHECKING:
    from forge_plugin_images.source import ImageDataset
    from forge_plugin_vision import ImageFormat, ImageInput

FIXED, FREE = ("stretch", "crop", "pad", "tiles", "aspect", "split"), ("native", "fill", "longest")
"""Policies of encoders with one size of images, and of those with any."""


def size_problems(keys: ImageDataset, seen: ImageInput) -> Iterator[Problem]:
    """Yields the problems of keys that say how images get their size; paths are relative to the dataset's table."""
    yield from channel_problems(seen.format)
    yield from _policy_problems(keys, seen)
    yield from _patch_problems(keys, seen)
    yield from _tile_problems(keys, seen)
    yield from split_problems(keys, seen)
    yield from _row_problems(keys, seen)


def _row_problems(keys: ImageDataset, seen: ImageInput) -> Iterator[Problem]:
    if keys.tile_text is None or not keys.tile_text.feature_row:
        return
    # By example: an adapter declares a count of features, not how they lie.
    side = seen.format.multiple
    grids = [Grid(1, side, side), Grid(1, 2 * side, 3 * side)]
    rows, columns = zip(*(feature_sides(seen, grid) for grid in grids), strict=True)
    if [seen.positions(grid) for grid in grids] != [rows[0] * columns[0], rows[1] * columns[1]]:
        adapter, fusion = type(seen.adapter).__name__, type(seen.fusion).__name__
        message = f"{keys.tile_text.feature_row!r} stands between rows of features"
        hint = "take adapter and fusion with a position for each square of patches, or leave it out"
        yield Problem("tile_text.feature_row", f"{message}, which images have not with {adapter} and {fusion}; {hint}")


def channel_problems(form: ImageFormat) -> Iterator[Problem]:
    """Yields the problem of an encoder whose channels no image of a file has."""
    if form.channels not in (1, 3):
        message = f"the encoder takes images of {form.channels} channels, and data have 3 (colours) or 1 (grey)"
        yield Problem("", f"{message}; take another encoder, or a dataset that makes such patches")


def _policy_problems(keys: ImageDataset, seen: ImageInput) -> Iterator[Problem]:
    form = seen.format
    if form.grid and keys.resize in FREE:
        rows, columns = form.grid
        size = f"{rows * form.patch} x {columns * form.patch} pixels"
        yield Problem("resize", f"{keys.resize!r}, but the encoder takes images of {size}; take one of {FIXED}")
    if form.joins_tiles and keys.resize in ("tiles", "aspect", "split"):
        message = f"{keys.resize!r} makes each tile an image, but the adapter joins an image's tiles"
        yield Problem("resize", f"{message}; take 'any_resolution', or 'pad' for images in one tile")
    if form.arrangements and not form.grid and keys.resize in (*FIXED, *FREE):
        yield Problem("resize", f"{keys.resize!r}, but the encoder takes images in tiles; take 'canvas'")
    elif not form.grid and keys.resize in FIXED:
        yield Problem("resize", f"{keys.resize!r}, but the encoder takes images of any size; take one of {FREE}")
    if keys.resize == "any_resolution" and not form.joins_tiles:
        message = "'any_resolution' is for adapters that join an image's tiles"
        hint = 'take model.vision.adapter.type = "any_resolution" with an encoder of images of one size'
        yield Problem("resize", f"{message}; {hint}, or leave the key out")
    if keys.max_tiled_images and keys.policy(seen) != "any_resolution":
        message = f'{keys.max_tiled_images} is for resize = "any_resolution"'
        yield Problem("max_tiled_images", f"{message}; set that, or leave it out")
    if (form.grid or not form.arrangements) and keys.resize == "canvas":
        policies = FIXED if form.grid else FREE
        yield Problem("resize", f"'canvas' is for encoders of images in tiles; take one of {policies}")


def _patch_problems(keys: ImageDataset, seen: ImageInput) -> Iterator[Problem]:
    form = seen.format
    for key in ("max_patches", "min_patches"):
        if (form.grid or form.arrangements) and (value := getattr(keys, key)):
            sizes = "one size" if form.grid else "the sizes of its tiles"
            yield Problem(key, f"{value}, but all images of this encoder have {sizes}; leave it out")
    # The same default as in `ImageDataset.processor`
    most = keys.max_patches or seen.patches_per_sequence // seen.images_per_sequence
    if not form.grid and most < form.multiple**2:
        message = f"{most} patches of an image at most, and the smallest has {form.multiple**2} with this adapter"
        yield Problem("max_patches", f"{message}; raise it, or model.vision.patches_per_sequence")
    if most > seen.patches_per_sequence:
        room = f"model.vision.patches_per_sequence = {seen.patches_per_sequence}"
        yield Problem("max_patches", f"{most}, and a sequence has {room}; lower the one or raise the other")
    if keys.min_patches > most:
        yield Problem("min_patches", f"{keys.min_patches} is more than max_patches, which is {most}")


def _tile_problems(keys: ImageDataset, seen: ImageInput) -> Iterator[Problem]:
    if keys.resize not in ("tiles", "aspect"):
        for key, default in (("max_tiles", 0), ("overview", "first")):
            if (value := getattr(keys, key)) != default and keys.resize != "split":
                yield Problem(key, f'{value!r} is for resize = "tiles"; set that, or leave it out')
        return
    if seen.format.grid is None:
        return
    if message := seen.fusion.tile_problem():
        yield Problem("resize", f"{keys.resize!r} makes several images of one, and {message}")
    tiles, whole = keys.tiles(seen), int(keys.overview != "none")
    if tiles < 2:
        hint = "take 2 or more, or leave it out" if keys.max_tiles else "raise model.vision.images_per_sequence"
        why = "an image needs at least 2" if keys.max_tiles else "a sequence has room for no more"
        yield Problem("max_tiles", f"{max(tiles, 0)}, and {why}; {hint}")
        return
    patches = math.prod(seen.format.grid)
    for name, one in (("images_per_sequence", 1), ("patches_per_sequence", patches)):
        if (needed := (tiles + whole) * one) > (room := getattr(seen, name)):
            has = f"an image may become {tiles} tiles{' and an overview' if whole else ''}"
            message = f"{has}, which need model.vision.{name} = {needed}, and it is {room}"
            yield Problem("max_tiles", f"{message}; raise it, or lower max_tiles")
