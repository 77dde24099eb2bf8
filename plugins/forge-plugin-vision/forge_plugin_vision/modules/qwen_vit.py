"""The encoder `qwen_vit`.

Where blocks have windows, patches are in windows' order between the first block and the last: the patches of a window
then follow one another, and a window lies in at most two neighbouring blocks of the sequence.

Shapes: B rows, P patches of a row, V values of a patch, W width, H heads, E width of a head, K patches of a window at
most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.contracts.model import Role
from forge_kit.nn.modules import Linear
from forge_kit.nn.taps import TapPoint
from forge_plugin_transformer.modules.rotary import rotate
from forge_plugin_vision.modules.tower_points import STREAM, tower_points
from forge_plugin_vision.modules.vit import attend as apart
from forge_plugin_vision.modules.vit import is_known

if TYPE_CHECKING:
    from forge_plugin_vision.kinds import Grid
    from forge_plugin_vision.modules.axial_rotary import AxialRotary
    from forge_plugin_vision.modules.images import Images
    from forge_plugin_vision.modules.positions import AxisTables, PositionTable


class Order(NamedTuple):
    """An order of the patches of each row in which the patches of a window follow one another."""

    before: Tensor
    """(B, P): place before sorting."""
    windows: Tensor
    """(B, P): window of each patch, by its first patch; ascending."""

    def sort(self, x: Tensor) -> Tensor:
        """(B, P, …) in this order."""
        return torch.take_along_dim(x, _like(self.before, x), 1)

    def restore(self, x: Tensor) -> Tensor:
        """(B, P, …) in the order before."""
        return torch.take_along_dim(x, _like(self.before.argsort(1), x), 1)


def _like(index: Tensor, x: Tensor) -> Tensor:
    return index.view(*index.shape, *(1 for _ in x.shape[2:]))


def by_windows(images: Images, side: int) -> Order:
    """Returns the order by windows of `side` x `side` patches from the upper left corner of each frame."""
    windows, before = _first_patches(images, images.row % side, images.column % side).sort(dim=1, stable=True)
    return Order(before, windows)


def frames(images: Images) -> Tensor:
    """Returns (B, P): the frame of each patch, by its first patch in the row; -1 for what fills it."""
    return _first_patches(images, images.row, images.column).where(images.valid, -1)


def _first_patches(images: Images, rows: Tensor, columns: Tensor) -> Tensor:
    """Returns (B, P): number in its row of the patch that lies so many rows and columns before each patch."""
    # One number for image, frame and window, which products of sizes would not be for every size.
    own = images.number.clamp(max=images.grids.shape[1] - 1)
    step = images.grids[..., 2].gather(1, own).clamp(min=1)
    return torch.arange(rows.shape[1], device=rows.device) - rows * step - columns


class Sight(NamedTuple):
    """Which patches see each other in a block."""

    mask: Tensor | None
    """(B, 1, P, P) bool, or with windows (B P / K, 1, K, 3 K), of each K patches and those up to K further. None: as
    `segments` say."""
    reach: int
    """K; 0: without windows."""
    segments: Tensor | None = None
    """(B, P): patches of the same number, which follow one another, see each other; -1 for what fills the row."""


def whole_sight(segments: Tensor) -> Sight:
    """Returns the sight of patches within equal `segments` (B, P); the patches of a segment are adjacent."""
    # One by one where the host has their values: a mask has P x P elements, and attention with it computes all.
    if is_known(segments):
        return Sight(None, 0, segments)
    return Sight((segments.unsqueeze(2) == segments.unsqueeze(1)).unsqueeze(1), 0)


def near_sight(segments: Tensor, reach: int) -> Sight:
    """Returns the same for segments that lie together and have `reach` patches at most."""
    # Padding sees itself: a row of the mask without any true would make attention NaN.
    own = F.pad(segments, (0, -segments.shape[1] % reach), value=-1).unflatten(1, (-1, reach))
    # -2 beyond the ends equals no segment, not even padding, which has -1
    mask = own.unsqueeze(-1) == _with_neighbours(own, -2).unsqueeze(-2)
    return Sight(mask.flatten(0, 1).unsqueeze(1), reach)


def _with_neighbours(x: Tensor, value: int) -> Tensor:
    """(B, n, K, …) -> (B, n, 3 K, …): each block between the one before and the one after; `value` beyond the ends."""
    padded = F.pad(x, (*(0 for _ in range(2 * (x.ndim - 2))), 1, 1), value=value)
    return torch.cat([padded[:, :-2], x, padded[:, 2:]], 2)


def attend(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
    """Attention among patches that see each other: (B, P, H, E) each -> (B, P, H, E)."""
    if sight.mask is None:
        return apart(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), sight.segments).transpose(1, 2)
    if not sight.reach:
        return _attention(q, k, v, sight.mask)
    patches, missing = q.shape[1], -q.shape[1] % sight.reach
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, sight.reach)) for x in (q, k, v))
    # 3 K keys for each K queries: the cost grows with P K and not with P².
    k, v = (_with_neighbours(x, 0) for x in (k, v))
    mixed = _attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), sight.mask)
    return mixed.view(*q.shape[:2], *mixed.shape[1:]).flatten(1, 2)[:, :patches]


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


class QwenBlock(nn.Module):
    """x + o(attention(qkv(norm(x)))), then x + ffn(norm(x))."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        norm: Callable[[], nn.Module],
        ffn: nn.Module,
        bias: bool,
        residual: float,
        std: float,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.ffn_norm = norm(), norm()
        self.qkv = Linear(width, 3 * width, bias=bias, std=std)
        self.o = Linear(width, width, bias=bias, std=residual)
        self.ffn = ffn

    def forward(self, x: Tensor, tables: Tensor, sight: Sight) -> Tensor:
        """(B, P, W) -> (B, P, W); `tables` are from `AxialRotary`."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = (rotate(part, tables[0], tables[1]) for part in (q, k))
        x = x + self.o(attend(q, k, v, sight).flatten(2))
        # Feed-forward parts of the transformer take a batch, of which these use nothing
        return x + self.ffn(self.ffn_norm(x), {})


class QwenVisionTransformer(nn.Module):
    """Patch projection, positions and blocks, with norms around them or without; see `VisionEncoderComponent`."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        *,
        patch: Linear,
        table: PositionTable | AxisTables | None,
        rotary: AxialRotary,
        pre_norm: nn.Module | None,
        last_norm: nn.Module | None,
        window: int,
        full_attention: Sequence[int],
        taps: Sequence[int],
    ) -> None:
        """Args: `window`, side in patches, 0 without windows; `full_attention`, numbers of blocks that have none."""
        super().__init__()
        self.width = patch.out_features
        self.window, self.full_attention, self.taps = window, frozenset(full_attention), frozenset(taps)
        self.patch, self.positions, self.rotary = patch, table, rotary
        self.pre_norm, self.last_norm = pre_norm, last_norm
        self.blocks = nn.ModuleList(blocks)

    def forward(self, patches: Tensor, images: Images) -> tuple[Tensor, ...]:
        """Returns the features, then the outputs of the taps: (B, P, W) each, in the order of `patches`."""
        x = self.patch(patches)
        if self.positions is not None:
            x = x + self.positions(images, x.dtype)[0]
        if self.pre_norm is not None:
            x = self.pre_norm(x)
        tables, segments = self.rotary(images, x.dtype), frames(images)
        if not self.window:
            return self._blocks(x, tables, [whole_sight(segments)] * len(self.blocks))
        order = by_windows(images, self.window)
        # One order for all blocks: those without windows attend in it as well, and nothing is moved between blocks.
        near, whole = near_sight(order.windows, self.window**2), whole_sight(order.sort(segments))
        sights = [whole if number in self.full_attention else near for number in range(len(self.blocks))]
        tables = torch.stack([order.sort(table) for table in tables.unbind()])
        return tuple(order.restore(state) for state in self._blocks(order.sort(x), tables, sights))

    def _blocks(self, x: Tensor, tables: Tensor, sights: Sequence[Sight]) -> tuple[Tensor, ...]:
        """Returns the last block's output, normalised where there is a norm, and then the outputs of the taps."""
        tapped = []
        for number, (block, sight) in enumerate(zip(self.blocks, sights, strict=True)):
            x = block(x, tables, sight)
            if number in self.taps:
                tapped.append(x)
        return (x if self.last_norm is None else self.last_norm(x), *tapped)

    def flops(self, grid: Grid) -> float:
        """Counts 6 a weight and patch, and 12 a pair of patches that see each other and element."""
        weights = sum(parameter.numel() for name, parameter in self._matrices())
        whole = len(self.full_attention) if self.window else len(self.blocks)
        pairs = whole * (grid.rows * grid.columns) ** 2
        if self.window:  # those at an image's edges are smaller
            # The sum of (r c)^2 over windows of r x c patches is the product of the sums of squares along each side.
            along = ((n // self.window) * self.window**2 + (n % self.window) ** 2 for n in (grid.rows, grid.columns))
            pairs = pairs + (len(self.blocks) - whole) * prod(along)
        return 6.0 * grid.patches * weights + 12.0 * grid.frames * pairs * self.width

    def _matrices(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters by which values of patches are multiplied."""
        return [pair for pair in self.named_parameters() if pair[1].ndim > 1 and pair[0] != "positions.weight"]

    def parameter_roles(self) -> Mapping[str, Role]:
        """Declares each `qkv` fused, since it stacks three matrices, and the position table an embedding."""
        fused: dict[str, Role] = {f"blocks.{number}.qkv.weight": "fused" for number in range(len(self.blocks))}
        return fused if self.positions is None else fused | {"positions.weight": "embedding"}

    def tap_points(self) -> Mapping[str, TapPoint]:
        """Patches are in the order of windows, where there are windows."""
        parts = {"attn_out": "o", "mlp_out": "ffn"}
        points = {**STREAM, **{name: TapPoint(part, axes="images") for name, part in parts.items()}}
        return tower_points(self.blocks, points)
