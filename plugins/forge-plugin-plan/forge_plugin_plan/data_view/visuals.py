"""Images and clips of a row, put together again from the very patches that the model gets.

S: positions of a row, P: patches, N: images and clips of a row at most, V: values of a patch, T: entries of a clip's
time axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from forge_core.contracts.data import IGNORED_LABEL

if TYPE_CHECKING:
    from forge_plugin_vision import Grid, ImageFormat, ImageInput

PATCHES, GRIDS, SECONDS = "patches", "grids", "grid_seconds"
"""Entries of samples with images: see `forge_plugin_vision.kinds`."""
CLIP = -2
"""Entry of `input_ids` at the positions of a clip; other negative ones are an image's."""


@frozen(kw_only=True, eq=False)
class Visual:
    """An image or a clip, as it stands in a row."""

    number: int
    """Among all of the row, from 0."""
    grid: Grid
    """Entries of the time axis (1 of an image), rows and columns, in patches. Of an image in tiles that are joined, the
    entries are the whole in one tile, and the tiles."""
    stated: Grid
    """As the row has it."""
    pixels: np.ndarray
    """(T, frames, height, width, channels) uint8; `frames` of an entry as the encoder's patches have them."""
    patch: int
    """Side of a patch in pixels."""
    positions: np.ndarray
    """(positions,) int64: where it stands in the row, ascending."""
    is_clip: bool
    seconds: float
    """Of a clip: from one entry of its time axis to the next; 0: unknown."""
    side: int
    """Patches along each side of the square that becomes one position; 0: its positions are no grid."""

    @property
    def name(self) -> str:
        """`image 1`, or `clip 2`, counted together."""
        return f"{'clip' if self.is_clip else 'image'} {self.number + 1}"

    @property
    def size(self) -> str:
        """Its patches and pixels."""
        time, rows, columns = self.grid
        if self.stated != self.grid:
            across, (_, shown_rows, shown_columns) = "{} x {}".format(*self.stated.tiles), self.stated
            pixels = f"{across} tiles of {rows * self.patch} x {columns * self.patch} pixels"
            return f"{pixels}, {shown_rows} x {shown_columns} patches of them shown, after the whole in one tile"
        frames = f"{time} x " if self.is_clip else ""
        pixels = f"{rows * self.patch} x {columns * self.patch} pixels"
        every = f", {self.seconds:.3g} s from one to the next" if self.is_clip and self.seconds else ""
        return f"{pixels}, {frames}{rows} x {columns} patches{every}"

    def shown_frames(self, entry: int) -> list[np.ndarray]:
        """Returns the (height, width, channels) of an entry's frames; of an image, which is repeated, the first."""
        return [*(self.pixels[entry] if self.is_clip else self.pixels[entry, :1])]

    def positions_of(self, entry: int) -> np.ndarray:
        """Returns the positions of one entry of the time axis; none if positions are not divided by entries."""
        if self.stated != self.grid:
            return self.positions[:0]
        each, rest = divmod(len(self.positions), self.grid.frames)
        return self.positions[:0] if rest else self.positions[entry * each : (entry + 1) * each]


def visuals_of(row: Mapping[str, np.ndarray], seen: ImageInput) -> list[Visual]:
    """Returns the images and clips of a row, in order.

    Args:
        row: its entries: `input_ids` (S,), `patches` (P, V), `grids` (N, 3), and `grid_seconds` (N,) if there is such.
        seen: what the model sees.
    """
    from forge_plugin_vision import Grid

    positions, ids = np.flatnonzero(row["input_ids"] < 0), row["input_ids"]
    grids = [Grid(*map(int, grid)) for grid in row[GRIDS] if grid[0]]
    seconds = row.get(SECONDS, np.zeros(len(row[GRIDS])))
    visuals, patch, position = [], 0, 0
    for number, grid in enumerate(grids):
        # Patches and positions of all images of a row follow each other in the same order
        own = positions[position : position + int(seen.positions(grid))]
        visuals.append(
            Visual(
                number=number,
                grid=grid.plain,
                stated=grid,
                pixels=pixels_of(row[PATCHES][patch : patch + grid.patches], grid, seen.format),
                patch=seen.format.patch,
                positions=own,
                # A clip of a single entry has the grid of an image; its id distinguishes it
                is_clip=grid.frames > 1 or bool(len(own) and ids[own[0]] == CLIP),
                seconds=float(seconds[number]),
                side=side_of_a_position(grid, seen),
            )
        )
        patch, position = patch + grid.patches, position + len(own)
    return visuals


def pixels_of(patches: np.ndarray, grid: Grid, form: ImageFormat) -> np.ndarray:
    """Put an image or a clip together again.

    Args:
        patches: (patches, V) uint8, missing ones black.
        grid: of the patches.
        form: the encoder's format.

    Returns:
        (T, frames, height, width, channels) uint8; of an image in tiles that are joined, T is the whole and each.
    """
    time, rows, columns = grid.plain
    # A faulty row may have fewer patches than its grids have; it is drawn all the same, and the fault is named
    whole = np.zeros((grid.patches, form.values), np.uint8)
    whole[: len(patches)] = patches
    cut = whole.reshape(time, rows, columns, form.channels, form.frames, form.patch, form.patch)
    ordered = cut.transpose(0, 4, 1, 5, 2, 6, 3)  # time, frame, row, y, column, x, channel
    return ordered.reshape(time, form.frames, rows * form.patch, columns * form.patch, form.channels)


def side_of_a_position(grid: Grid, seen: ImageInput) -> int:
    """Returns how many patches along each side become one position; 0 where positions are no grid of such squares.

    A fusion with one position for a whole image, and an adapter with as many features for any image, have no such grid.
    """
    side = seen.adapter.multiple
    squares = grid.frames * (grid.rows // side) * (grid.columns // side)
    is_square = seen.encoder.feature_grid(grid) == grid and int(seen.positions(grid)) == squares
    return side if is_square else 0


def faults_of(row: Mapping[str, np.ndarray], visuals: Sequence[Visual], seen: ImageInput) -> Iterator[str]:
    """Yields the faults in the images of a row that are easy to miss in the picture."""
    positions, wanted = int((row["input_ids"] < 0).sum()), sum(int(seen.positions(visual.stated)) for visual in visuals)
    if positions != wanted:
        yield f"input_ids have {positions:,} positions of images, and the grids take {wanted:,}"
    used = sum(visual.grid.patches for visual in visuals)
    if used > len(row[PATCHES]):
        yield f"the grids have {used:,} patches, and the row has room for {len(row[PATCHES]):,}"
    elif row[PATCHES][used:].any():
        yield f"patches that are not zero follow the {used:,} of the grids"
    if (row["labels"] < 0).sum() != (row["labels"] == IGNORED_LABEL).sum():
        yield "labels have positions of images, which nothing can predict"
    for visual in visuals:
        # A still image is repeated in all frames of its patches
        if not visual.is_clip and (visual.pixels != visual.pixels[:, :1]).any():
            yield f"{visual.name} is no clip, and the frames of its patches differ"
