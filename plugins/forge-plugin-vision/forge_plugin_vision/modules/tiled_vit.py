"""The encoder `tiled_vit`.

Shapes: B rows, N images of a row at most, P patches of a row, V values of a patch, W width of blocks; T tiles of an
image at most, G patches of a tile, L positions of a tile (a class token, G patches and padding), A arrangements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.contracts.model import Role
from forge_kit.nn.modules import LayerNorm, Linear
from forge_kit.nn.taps import TapPoint
from forge_plugin_vision.modules.activations import ACTIVATIONS
from forge_plugin_vision.modules.gate import Gate
from forge_plugin_vision.modules.tower_points import PLAIN, tower_points
from forge_plugin_vision.tiled_vit import PADDED_TO

if TYPE_CHECKING:
    from forge_core.contracts.model import Fill
    from forge_plugin_vision.kinds import Grid
    from forge_plugin_vision.modules.images import Images
    from forge_plugin_vision.tiled_vit import TiledViT


class Tiles:
    """Where the patches and features of a micro-batch stand, by arithmetic on the device alone.

    The blocks see T tiles of each of a row's N images, those that an image lacks and images that a row lacks too: a
    tile that is not there takes part in the attention of those that are, as when the published towers were trained.
    """

    def __init__(self, images: Images, side: int, most: int) -> None:
        """Args: `side`, patches along a tile; `most`, T."""
        patches, device = images.number.shape[1], images.grids.device
        rows, columns = (images.grids[..., n] // side for n in (1, 2))
        self.arrangement = torch.stack([rows, columns], -1)
        """(B, N, 2): rows and columns of tiles."""
        tiles = rows * columns
        number = torch.arange(most, device=device)
        self.there = number < tiles.unsqueeze(-1)
        """(B, N, T) bool."""
        place = torch.arange(side**2, device=device)
        # An image that a row lacks has no columns to divide by
        across = columns.clamp(min=1).unsqueeze(-1)
        # Of a tile's patches in the image, which has its patches row by row over all tiles.
        row = (number // across * side).unsqueeze(-1) + place // side
        column = (number % across * side).unsqueeze(-1) + place % side
        start = (tiles.cumsum(1) - tiles) * side**2
        index = start[..., None, None] + row * (columns * side)[..., None, None] + column
        self.patches = index.clamp(max=max(patches - 1, 0)).flatten(1)
        """(B, N T G): number of the patch of each place of a tile, and any where there is none."""
        ends = tiles.cumsum(1)
        # Contiguous, as `searchsorted` would warn that it has to copy the expanded index
        index = torch.arange(patches // side**2, device=device).expand(len(ends), -1).contiguous()
        owner = torch.searchsorted(ends, index, right=True).clamp(max=ends.shape[1] - 1)
        # Behind the last tile the number would grow beyond T; nothing reads the tile that it names then.
        within = (index - (ends - tiles).gather(1, owner)).clamp(max=most - 1)
        self.features = owner * most + within
        """(B, P // G): number, among N T, of each tile that is there, in turn; any behind the last."""


class TileTable(nn.Module):
    """Learned vectors (T, K, W) of each arrangement of tiles, times a gate; the first row is for no image."""

    def __init__(self, arrangements: int, tiles: int, places: int, width: int, std: float) -> None:
        """Args: `places`, K, of a tile."""
        super().__init__()
        self.shape, self.std = (tiles, places, width), std
        self.weight = nn.Parameter(torch.empty(arrangements + 1, tiles * places * width))
        self.gate = Gate(0.0)

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Draw the vectors of all arrangements from N(0, std²); the gate multiplies them by 0 at first."""
        fill.normal(self.std)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, chosen: Tensor) -> Tensor:
        """(images, A + 1), of zeros and a one, in the compute dtype, to (images, T, K, W)."""
        # A product, whose gradient is summed in a fixed order, unlike the gradient of indexing.
        rows: Tensor = self.gate(chosen @ self.weight.to(chosen.dtype))
        return rows.unflatten(-1, self.shape)


class TilePositions(nn.Module):
    """Gated position embedding of tiles: (1 - tanh(gate)) times one for all tiles, plus the output of `tiles`.

    `tiles` multiplies the embedding of the tile's arrangement by tanh(gate), with the same gate.
    """

    def __init__(self, places: int, width: int, tiles: TileTable, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(places, width))
        self.tiles = tiles

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Draw the embedding for all tiles from N(0, std²)."""
        fill.normal(self.std)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, chosen: Tensor) -> Tensor:
        """As `TileTable`."""
        weight = self.weight.to(chosen.dtype)
        return weight - self.tiles.gate(weight) + self.tiles(chosen)


class TiledBlock(nn.Module):
    """x + gate(attention(norm(x))), then x + gate(down(activation(up(norm(x))))), among all tiles of an image."""

    def __init__(
        self, width: int, heads: int, hidden: int, *, activation: str, eps: float, std: float, gate: float | None
    ) -> None:
        """Args: `gate`, the initial value of both gates; None: there are none."""
        super().__init__()
        self.heads, self.activation = heads, ACTIVATIONS[activation]
        self.attention_norm, self.ffn_norm = LayerNorm(width, eps=eps), LayerNorm(width, eps=eps)
        self.q, self.k, self.v, self.o = (Linear(width, width, std=std) for _ in range(4))
        self.up = Linear(width, hidden, bias=True, std=std)
        self.down = Linear(hidden, width, bias=True, std=std)
        self.attention_gate, self.ffn_gate = (nn.Identity() if gate is None else Gate(gate) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(images, T L, W); `mask` (images, 1, T L, T L) bool, whether a position attends to another."""
        h = self.attention_norm(x)
        q, k, v = (part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        x = x + self.attention_gate(self.o(attended))
        return x + self.ffn_gate(self.down(self.activation(self.up(self.ffn_norm(x)))))


class TiledVisionTransformer(nn.Module):
    """See `forge_plugin_vision.TiledViT`, and `VisionEncoderComponent` for the contract."""

    arrangements: Tensor

    def __init__(self, keys: TiledViT) -> None:
        super().__init__()
        width, std, places = keys.dim, keys.init_std, keys.side**2 + 1
        self.side, self.most, self.std, self.intermediate = keys.side, keys.most_tiles, std, keys.intermediate
        self.first, self.layers, self.known = places, keys.layers, keys.arrangements
        self.length = places + -places % PADDED_TO
        self.width = width * (1 + len(keys.intermediate))
        self.patch = Linear(keys.image_format().values, width, std=std)
        self.class_token = nn.Parameter(torch.empty(width))
        before, after, of_places = (
            TileTable(len(self.known), self.most, count, width, std) for count in (1, 1, places)
        )
        self.before, self.after = before, after
        self.positions = TilePositions(places, width, of_places, std)
        self.pre_norm, self.norm = LayerNorm(width), LayerNorm(width)  # eps 1e-5, whatever `keys.eps` is
        self.blocks = nn.ModuleList(
            TiledBlock(
                width,
                keys.heads,
                keys.hidden or 4 * width,
                activation=keys.activation,
                eps=keys.eps,
                std=std,
                gate=None if number < keys.layers else keys.gate_start,
            )
            for number in range(keys.layers + keys.global_layers)
        )
        self.register_buffer("arrangements", torch.empty(len(self.known), 2, dtype=torch.int64), persistent=False)

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Draw the class token from N(0, std²)."""
        fill.normal(self.std)

    def init_buffers(self, device: torch.device) -> None:
        """Copies the arrangements to the device, where grids are compared with them."""
        self.arrangements.copy_(torch.tensor(self.known))

    def forward(self, patches: Tensor, images: Images) -> tuple[Tensor]:
        """Returns (B, F, `width`): for each tile the feature of its class token, then of its patches."""
        tiles = Tiles(images, self.side, self.most)
        count = tiles.there.shape[0] * tiles.there.shape[1]
        there = tiles.there.reshape(count, self.most)
        chosen = self._chosen(tiles.arrangement.reshape(count, 2), patches.dtype)
        x = _taken(self.patch(patches), tiles.patches).view(count, self.most, self.side**2, -1)
        # Zeros for tiles that are not there, which the projection makes of zeros, as it has no bias
        x = x * there[..., None, None].to(x.dtype) + self.before(chosen)
        token = self.class_token.to(x.dtype).expand(count, self.most, 1, -1)
        x = self.pre_norm(torch.cat([token, x], 2) + self.positions(chosen))
        # Each tile is padded before they are joined, as in `MllamaVisionModel`.
        x = F.pad(x, (0, 0, 0, self.length - self.first)).flatten(1, 2)

        mask, parts = self._mask(there), dict[int, Tensor]()
        for number, block in enumerate(self.blocks[: self.layers]):
            x = block(x, mask)
            if number in self.intermediate:
                parts[number] = x
        # The norm is between both stacks of blocks; none follows the second.
        x = self.norm(x).unflatten(1, (self.most, self.length)) + self.after(chosen)
        x = x.flatten(1, 2)
        for block in self.blocks[self.layers :]:
            x = block(x, mask)
        # The outputs of blocks are interleaved, element by element, as in the published towers.
        inner = [torch.stack([parts[number] for number in self.intermediate], -1).flatten(-2)] if parts else []
        x = torch.cat([x, *inner], -1).unflatten(1, (self.most, self.length))[:, :, : self.first]
        # Tiles that are there come first in a row, as its features are read.
        features = _taken(x.reshape(len(patches), -1, self.first * self.width), tiles.features)
        return (features.unflatten(-1, (self.first, self.width)).flatten(1, 2),)

    def _chosen(self, arrangement: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns (images, A + 1), one at the number of an image's arrangement, or at 0 where there is no image."""
        equal = (arrangement.unsqueeze(1) == self.arrangements).all(-1)
        return torch.cat([~equal.any(-1, keepdim=True), equal], 1).to(dtype)

    def _mask(self, there: Tensor) -> Tensor:
        """Returns (images, 1, T L, T L): all but pairs of padding; padding attends to the positions of tiles.

        These attend to padding too, since the published towers were trained this way.
        """
        filled = there.unsqueeze(-1) & (torch.arange(self.length, device=there.device) < self.first)
        filled = filled.flatten(1) | ~there.any(1, keepdim=True)  # of no image: attention that is finite
        return (filled.unsqueeze(1) | filled.unsqueeze(2)).unsqueeze(1)

    def flops(self, grid: Grid) -> float:
        """Counts 6 a weight and position, and 12 a pair of positions and element, of T tiles for each image."""
        matrices = sum(p.numel() for p in self.blocks.parameters() if p.ndim > 1)
        width, positions = self.class_token.numel(), self.most * self.length
        of_position = 6 * matrices + 12 * width * len(self.blocks) * positions
        return 6 * self.patch.weight.numel() * grid.patches + (grid.patches > 0) * 1.0 * positions * of_position

    def parameter_roles(self) -> Mapping[str, Role]:
        """Declares the tables and the class token embeddings; rows of a table are selected by a product."""
        tables = ("class_token", "before.weight", "after.weight", "positions.weight", "positions.tiles.weight")
        return dict.fromkeys(tables, "embedding")

    def tap_points(self) -> Mapping[str, TapPoint]:
        """Rows are images; a row has the positions of all tiles. What parts add has passed their gates."""
        gated = {"attn_out": "attention_gate", "mlp_out": "ffn_gate"}
        points = {**PLAIN, **{name: TapPoint(gate, axes="images") for name, gate in gated.items()}}
        return tower_points(self.blocks, points)


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """Returns the vectors (B, I, W) of x (B, P, W) at index (B, I)."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
