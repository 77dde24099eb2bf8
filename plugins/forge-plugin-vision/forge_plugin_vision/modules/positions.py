"""Learned position tables of vision transformers, resized to the grid of each image.

Shapes: B rows, P patches of a row, W width, T entries of the table along one side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from forge_core.contracts.model import Fill
    from forge_plugin_vision.modules.images import Images

# Resizing a table to a grid is linear and separable: the vector of a patch is the table times the coefficients of its
# row and of its column. As matrix products they need no shapes on the host, which would have to wait for the device to
# know them, and no loop over images. A table of 16 x 16 costs less than one part in 200 of a base tower.


def bilinear(place: Tensor, size: Tensor, entries: int) -> Tensor:
    """Coefficients of `F.interpolate(mode="bilinear", antialias=True)`, as in SigLIP2 with NaFlex.

    Args:
        place: (B, P), row or column of each patch, in the dtype of the result.
        size: (B, P), rows or columns of its image.
        entries: T.

    Returns:
        (B, P, T).
    """
    scale = (entries / size).unsqueeze(-1)
    centre = (place.unsqueeze(-1) + 0.5) * scale
    taps = torch.arange(entries, device=place.device, dtype=place.dtype) + 0.5
    # A triangle around the centre, which widens where the table shrinks; cut at the table's ends and normalised.
    weights = (1 - (taps - centre).abs() / scale.clamp(min=1)).clamp(min=0)
    return weights / weights.sum(-1, keepdim=True)


def aligned(place: Tensor, size: Tensor, entries: int) -> Tensor:
    """Coefficients of `F.interpolate(mode="bilinear", align_corners=True)`, as in Qwen3-VL."""
    # Ends lie on ends; a side of one patch takes the first entry.
    at = place * (entries - 1) / (size - 1).clamp(min=1)
    taps = torch.arange(entries, device=place.device, dtype=place.dtype)
    return (1 - (at.unsqueeze(-1) - taps).abs()).clamp(min=0)


def bicubic(place: Tensor, size: Tensor, entries: int) -> Tensor:
    """Coefficients of `F.interpolate(mode="bicubic")`, as `interpolate_pos_encoding` of SigLIP, CLIP and ViT."""
    at = (place + 0.5) * (entries / size) - 0.5
    first = at.floor()
    taps = torch.arange(entries, device=place.device, dtype=place.dtype)
    total = torch.zeros((), device=place.device, dtype=place.dtype)
    for offset in (-1, 0, 1, 2):
        # Beyond the table its end counts again, as in torch.
        nearest = (first + offset).clamp(0, entries - 1)
        weight = _keys((at - first - offset).abs())
        total = total + weight.unsqueeze(-1) * (taps == nearest.unsqueeze(-1))
    return total


def nearest(place: Tensor, size: Tensor, entries: int) -> Tensor:
    """One for the entry floor(place T / size), as in Idefics2, Idefics3 and SmolVLM."""
    taps = torch.arange(entries, device=place.device, dtype=place.dtype)
    # Whole numbers below 2^24 divide exactly enough in float32 that the floor is right.
    entry = torch.div(place * entries, size, rounding_mode="floor")
    return (taps == entry.unsqueeze(-1)).to(place.dtype)


def _keys(distance: Tensor) -> Tensor:
    """Keys' cubic convolution (1981) with a = -0.75, at distances from 0 to 2."""
    a = -0.75  # torch's, without antialias
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return near.where(distance <= 1, far)


INTERPOLATIONS: Mapping[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "bilinear": bilinear,
    "aligned": aligned,
    "bicubic": bicubic,
    "nearest": nearest,
}


class PositionTable(nn.Module):
    """One learned vector (W) for each place of a grid of patches, after one for a class token where there is one."""

    def __init__(self, grid: tuple[int, int], width: int, *, interpolation: str, class_token: bool, std: float) -> None:
        """Args: `interpolation`, "none" where every image has this grid."""
        super().__init__()
        self.grid, self.std, self.first = grid, std, int(class_token)
        self.coefficients = INTERPOLATIONS.get(interpolation)
        self.weight = nn.Parameter(torch.empty(self.first + grid[0] * grid[1], width))

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Draw all vectors from N(0, std²), the class token's included."""
        fill.normal(self.std)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, images: Images, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Returns (B, P, W), or (P, W) where all rows have the same, and the class token's (W) if there is one."""
        # Both here, as a stage may replace parameters while this very module runs, and not in its parent.
        weight = self.weight.to(dtype)
        return self._of_patches(weight[self.first :], images), weight[0] if self.first else None

    def _of_patches(self, table: Tensor, images: Images) -> Tensor:
        dtype = table.dtype
        if self.coefficients is None:
            patches = images.number.shape[1]
            return table.repeat(-(-patches // len(table)), 1)[:patches]  # images follow one another
        # bfloat16 does not represent all whole numbers above 256.
        wide = torch.promote_types(dtype, torch.float32)
        own = images.number.clamp(max=images.grids.shape[1] - 1)
        sides = (images.grids[..., side].gather(1, own).clamp(min=1).to(wide) for side in (1, 2))
        places = (images.row.to(wide), images.column.to(wide))
        rows, columns = map(self.coefficients, places, sides, self.grid)
        return (rows.unsqueeze(-1) * columns.unsqueeze(-2)).flatten(-2).to(dtype) @ table


class AxisTables(nn.Module):
    """The sum of a learned vector (W) for a patch's column, and of another for its row (Gemma 4)."""

    def __init__(self, places: int, width: int, *, std: float) -> None:
        """Args: `places`, columns and rows of an image at most."""
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(2, places, width))

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Draw all vectors from N(0, std²)."""
        fill.normal(self.std)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, images: Images, dtype: torch.dtype) -> tuple[Tensor, None]:
        """Returns (B, P, W); there is no class token."""
        # What fills a row has places behind its last image, which the tables need not have.
        last = self.weight.shape[1] - 1
        columns, rows = (
            F.embedding(place.clamp(max=last), table)
            for place, table in zip((images.column, images.row), self.weight.unbind(), strict=True)
        )
        return columns.to(dtype) + rows.to(dtype), None
