"""Places of patches in their images. Shapes: B rows, N images of a row at most, P patches of a row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from forge_plugin_vision.kinds import Grid


class Images(NamedTuple):
    """The images of a micro-batch: which image each patch belongs to, and where in it. All int64, on the device."""

    grids: Tensor
    """(B, N, 3): frames, rows and columns of each image, as the batch has them; zeros: no image."""
    number: Tensor
    """(B, P): number of the patch's image in its row; N for what fills the row."""
    frame: Tensor
    """(B, P), as `row` and `column`: place of the patch in its image; tiles that are joined count as frames."""
    row: Tensor
    column: Tensor

    @property
    def valid(self) -> Tensor:
        """(B, P) bool: false for what fills the row."""
        return self.number < self.grids.shape[1]

    def at(self, index: Tensor) -> Images:
        """Returns the places of entries (B, S), given by their numbers in each row."""
        number, frame, row, column = (each.gather(1, index) for each in self[1:])
        return Images(self.grids, number, frame, row, column)

    @classmethod
    def of(cls, grids: Tensor, patches: int) -> Images:
        """Returns the places of `patches` entries a row, filled by images of these grids (B, N, 3) in turn."""
        # By arithmetic on the device alone: asking how large an image is would make the host wait.
        plain = plain_grids(grids)
        sizes = plain.prod(-1)
        ends = sizes.cumsum(1)
        # searchsorted warns of expanded values, and copies them itself
        index = torch.arange(patches, device=grids.device).expand(len(grids), -1).contiguous()
        # To the right of equal ends, so that an image without patches is skipped
        number = torch.searchsorted(ends, index, right=True)
        own = number.clamp(max=grids.shape[1] - 1)
        _, rows, columns = (plain[..., side].gather(1, own).clamp(min=1) for side in range(3))  # no division by 0
        within = index - (ends - sizes).gather(1, own)
        return cls(grids, number, within // (rows * columns), within // columns % rows, within % columns)


def plain_grids(grids: Tensor) -> Tensor:
    """Returns `Grid.plain` of grids (…, 3), whose products are the patches of images."""
    frames, rows, columns = grids.unbind(-1)
    return torch.stack(Grid(frames, rows, columns).plain, -1)  # type: ignore[arg-type]
