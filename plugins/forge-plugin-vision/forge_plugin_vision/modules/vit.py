"""The encoder `vit`. Shapes: B rows, N images of a row at most, P patches of a row, V values of a patch, W width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.contracts.model import Role
from forge_kit.nn.modules import LayerNorm, Linear
from forge_kit.nn.taps import TapPoint
from forge_plugin_transformer.modules.rotary import rotate
from forge_plugin_vision.modules.activations import ACTIVATIONS
from forge_plugin_vision.modules.axial_rotary import CountedRotary
from forge_plugin_vision.modules.positions import PositionTable
from forge_plugin_vision.modules.tower_points import PLAIN, tower_points

if TYPE_CHECKING:
    from forge_core.contracts.model import Fill
    from forge_plugin_vision.kinds import Grid
    from forge_plugin_vision.modules.images import Images


class Arrangement(Protocol):
    """The sequences that the blocks see: a micro-batch's patches, and a class token for each image if there is one."""

    @property
    def segments(self) -> Tensor | None:
        """(sequences, length): positions with the same number attend to each other; -1: filler. None: all do."""

    def arrange(self, x: Tensor, token: Tensor | None) -> Tensor:
        """(B, P, W) and a class token (W) to (sequences, length, W)."""

    def restore(self, x: Tensor) -> Tensor:
        """Back to (B, P, W), without class tokens."""


class OneSize:
    """Images of one grid: each is a sequence, which needs no mask."""

    segments = None

    def __init__(self, images: Images, patches: int) -> None:
        """Args: `patches` of each image."""
        self.rows, self.length = images.number.shape
        self.patches = patches

    def arrange(self, x: Tensor, token: Tensor | None) -> Tensor:
        """Fills each row up to whole images with zeros: (B, P, W) to (images, 1 + patches, W), or without the 1."""
        rest = -self.length % self.patches  # a row may have room for a part of an image
        x = F.pad(x, (0, 0, 0, rest)) if rest else x
        x = x.reshape(-1, self.patches, x.shape[-1])
        return x if token is None else torch.cat([token.expand(len(x), 1, -1), x], 1)

    def restore(self, x: Tensor) -> Tensor:
        """Drops the class tokens and the zeros that filled rows up."""
        # The class token is the first position of a sequence, if there is one
        return x[:, -self.patches :].reshape(self.rows, -1, x.shape[-1])[:, : self.length]


class AnySize:
    """Images of any grids: each row is a sequence, in which every frame of an image attends to itself alone."""

    def __init__(self, images: Images) -> None:
        # One number for image and frame: the number of a frame is below P.
        self.segments = torch.where(images.valid, images.number * images.number.shape[1] + images.frame, -1)

    def arrange(self, x: Tensor, token: Tensor | None) -> Tensor:
        """Returns x as it is; this arrangement has no class tokens."""
        return x

    def restore(self, x: Tensor) -> Tensor:
        return x


class AnySizeWithClassToken:
    """Images of any grids: each row is a sequence, in which each image follows its class token."""

    def __init__(self, images: Images) -> None:
        sizes, index = images.grids.prod(-1), torch.arange(images.number.shape[1], device=images.number.device)
        self.rows, self.count = sizes.shape
        numbers = torch.arange(self.count, device=sizes.device).expand(self.rows, -1)
        # One class token for each image up to a patch's own comes before the patch.
        patches = index + (images.number + 1).clamp(max=self.count)
        self.places = torch.cat([patches, sizes.cumsum(1) - sizes + numbers], 1)
        owners = torch.cat([images.number.where(images.valid, -1), numbers], 1)
        self.segments = torch.empty_like(owners).scatter_(1, self.places, owners)
        index = torch.arange(owners.shape[1], device=index.device).expand(self.rows, -1)
        # The inverse of `places`, so that both directions are gathers
        self.sources = torch.empty_like(index).scatter_(1, self.places, index)

    def arrange(self, x: Tensor, token: Tensor | None) -> Tensor:
        """Maps (B, P, W) to (B, P + N, W); images that a row lacks have a token, too."""
        assert token is not None
        return _taken(torch.cat([x, token.expand(self.rows, self.count, -1)], 1), self.sources)

    def restore(self, x: Tensor) -> Tensor:
        """Returns the patches in their order before: (B, P + N, W) to (B, P, W)."""
        return _taken(x, self.places[:, : -self.count])


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """Returns the vectors (B, I, W) of x (B, P, W) at index (B, I)."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> Tensor:
    """Attention of (B, H, P, E) in each segment; see `Arrangement.segments`."""
    if segments is None:
        return F.scaled_dot_product_attention(q, k, v)
    if is_known(segments) and not torch.compiler.is_compiling():  # a compiled block must not depend on their lengths
        rows = zip(q.split(1), k.split(1), v.split(1), segments, strict=True)
        return torch.cat([_segment_by_segment(*row) for row in rows])
    mask = segments.unsqueeze(2) == segments.unsqueeze(1)
    return F.scaled_dot_product_attention(q, k, v, mask.unsqueeze(1))


def is_known(segments: Tensor) -> bool:
    """Whether the host can read the segments without waiting; fake tensors, in a planned step, have no values."""
    return segments.device.type == "cpu" and type(segments) is Tensor


def _segment_by_segment(q: Tensor, k: Tensor, v: Tensor, segments: Tensor) -> Tensor:
    """Attention of one row (1, H, P, E), whose segments are (P); filler becomes zeros."""
    numbers, lengths = (each.tolist() for each in torch.unique_consecutive(segments, return_counts=True))
    parts = zip(*(each.split(lengths, 2) for each in (q, k, v)), strict=True)
    return torch.cat([_of_segment(number, *each) for number, each in zip(numbers, parts, strict=True)], 2)


def _of_segment(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # Zeros that depend on all three: every parameter has a gradient on each rank, whether or not it has images.
    return (q + k + v) * 0 if number < 0 else F.scaled_dot_product_attention(q, k, v)


class LayerScale(nn.Module):
    """A learned factor of each channel (CaiT, Touvron et al. 2021)."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.weight, self.start = nn.Parameter(torch.empty(width)), start

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Starts the factors of all channels at `start`."""
        fill.constant(self.start)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype)


@frozen(kw_only=True)
class BlockForm:
    """What blocks of towers differ in; see the keys of `ViT`."""

    activation: str
    eps: float
    std: float
    norm: str = "layernorm"
    qk_norm: bool = False
    attention_bias: bool = True
    layer_scale: float = 0.0

    def new_norm(self, width: int) -> nn.Module:
        """Returns a norm before attention or the feed-forward part."""
        return _root_mean_square(width, self.eps) if self.norm == "rmsnorm" else LayerNorm(width, eps=self.eps)

    def new_scale(self, width: int) -> nn.Module:
        """Returns the module that is applied to the output of attention or of the feed-forward part."""
        return LayerScale(width, self.layer_scale) if self.layer_scale else nn.Identity()

    def new_qk_norm(self, width: int) -> nn.Module:
        """Returns the module that is applied to the queries or keys of all heads."""
        return _root_mean_square(width, QK_EPS) if self.qk_norm else nn.Identity()


QK_EPS = 1e-6
"""Added to the mean square of queries and keys, whatever is in other norms (InternVL)."""


def _root_mean_square(width: int, eps: float) -> nn.Module:
    from forge_plugin_transformer.modules.norms import RootMeanSquareNorm

    return RootMeanSquareNorm(width, eps=eps)


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + down(activation(up(norm(x)))), with attention among the patches of an image."""

    def __init__(self, width: int, heads: int, hidden: int, form: BlockForm) -> None:
        super().__init__()
        self.heads, self.activation = heads, ACTIVATIONS[form.activation]
        self.attention_norm, self.ffn_norm = form.new_norm(width), form.new_norm(width)
        self.q, self.k, self.v = (Linear(width, width, bias=form.attention_bias, std=form.std) for _ in range(3))
        self.o = Linear(width, width, bias=True, std=form.std)
        self.q_norm, self.k_norm = form.new_qk_norm(width), form.new_qk_norm(width)
        self.up = Linear(width, hidden, bias=True, std=form.std)
        self.down = Linear(hidden, width, bias=True, std=form.std)
        self.attention_scale, self.ffn_scale = form.new_scale(width), form.new_scale(width)

    def forward(self, x: Tensor, segments: Tensor | None, tables: Tensor | None) -> Tensor:
        """(B, P, W) -> (B, P, W); `segments` as in `Arrangement`, `tables` (2, B, P, 1, E) for `rotate`, if any."""
        h = self.attention_norm(x)
        whole = self.q_norm(self.q(h)), self.k_norm(self.k(h)), self.v(h)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in whole)
        if tables is not None:
            q, k = (rotate(part, tables[0], tables[1]) for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        x = x + self.attention_scale(self.o(attend(q, k, v, segments).transpose(1, 2).flatten(2)))
        mixed: Tensor = x + self.ffn_scale(self.down(self.activation(self.up(self.ffn_norm(x)))))
        return mixed


class VisionTransformer(nn.Module):
    """Patch projection, positions, blocks and a last norm; see `VisionEncoderComponent` for the contract."""

    def __init__(
        self,
        *,
        values: int,
        width: int,
        layers: int,
        heads: int,
        hidden: int,
        grid: tuple[int, int],
        interpolation: str,
        class_token: bool,
        pre_norm: bool,
        norm: bool,
        patch_bias: bool,
        rotary_theta: float,
        form: BlockForm,
        taps: Sequence[int],
    ) -> None:
        """Args: `values`, V; `grid`, rows and columns of the position table; others as the keys of `ViT`."""
        super().__init__()
        eps, std = form.eps, form.std
        self.width, self.taps, self.grid, self.std = width, tuple(taps), grid, std
        self.one_size = interpolation == "none"
        self.patch = Linear(values, width, bias=patch_bias, std=std)
        self.class_token = nn.Parameter(torch.empty(width)) if class_token else None
        self.positions = PositionTable(grid, width, interpolation=interpolation, class_token=class_token, std=std)
        self.rotary = CountedRotary(width // heads, rotary_theta) if rotary_theta else None
        self.pre_norm = LayerNorm(width, eps=eps) if pre_norm else None
        self.blocks = nn.ModuleList(EncoderBlock(width, heads, hidden, form) for _ in range(layers))
        self.norm = LayerNorm(width, eps=eps) if norm else None

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Draw the class token from N(0, std²)."""
        fill.normal(self.std)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self, patches: Tensor, images: Images) -> tuple[Tensor, ...]:
        """Returns the last output, through the last norm if there is one, then the taps' outputs without it."""
        arrangement = self._arrangement(images)
        x = self.patch(patches)
        # Before tokens are inserted: `images` has the places of patches alone.
        places, first = self.positions(images, x.dtype)
        token = None if self.class_token is None else self.class_token.to(x.dtype) + first
        x = arrangement.arrange(x + places, token)
        x = x if self.pre_norm is None else self.pre_norm(x)
        tables = None if self.rotary is None else self._tables(self.rotary, images, arrangement, x.dtype)
        tapped = []
        for number, block in enumerate(self.blocks):
            x = block(x, arrangement.segments, tables)
            if number in self.taps:
                tapped.append(arrangement.restore(x))
        x = arrangement.restore(x)
        return (x if self.norm is None else self.norm(x), *tapped)

    def _tables(self, rotary: CountedRotary, images: Images, arrangement: Arrangement, dtype: torch.dtype) -> Tensor:
        """Returns cosine and sine (2, sequences, length, 1, E) of the sequences; class tokens are not rotated."""
        parts = []
        for table, still in zip(rotary(images, dtype).squeeze(3).unbind(), (1.0, 0.0), strict=True):
            token = None if self.class_token is None else table.new_full((table.shape[-1],), still)
            parts.append(arrangement.arrange(table, token))
        return torch.stack(parts).unsqueeze(3)

    def _arrangement(self, images: Images) -> Arrangement:
        if self.one_size:
            return OneSize(images, self.grid[0] * self.grid[1])
        return AnySize(images) if self.class_token is None else AnySizeWithClassToken(images)

    def flops(self, grid: Grid) -> float:
        """Counts 6 a weight and position, and 12 a pair of positions that see each other and element."""
        # Each frame is a separate sequence, unless images of any size have a class token.
        apart = self.one_size or self.class_token is None
        sequences = grid.frames if apart else (grid.patches > 0) * 1.0
        length = grid.rows * grid.columns * (1 if apart else grid.frames) + (self.class_token is not None)
        matrices = sum(p.numel() for p in self.blocks.parameters() if p.ndim > 1)
        of_position = 6 * matrices + 12 * self.width * len(self.blocks) * length
        return 6 * self.patch.weight.numel() * grid.patches + sequences * length * of_position

    def parameter_roles(self) -> Mapping[str, Role]:
        """Declares the position table and the class token embeddings."""
        return {"positions.weight": "embedding", **({} if self.class_token is None else {"class_token": "embedding"})}

    def tap_points(self) -> Mapping[str, TapPoint]:
        """Returns the points of all blocks; class tokens are among their positions."""
        return tower_points(self.blocks, PLAIN)
