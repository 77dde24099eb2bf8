"""How the parts of a block join the residual stream. Shapes: B sequences, S positions, n streams, D model width.

Between layers the carry is (B, S, n, D), or (B, S, D) for a single stream. Coefficients are float32 or wider.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_kit.nn.direct_calls import directly_callable
from forge_kit.nn.modules import cast

if TYPE_CHECKING:
    from forge_core.contracts.model import Fill, Role

Branch = Callable[[Tensor], Tensor]
"""A part of a block with its norms: (B, S, D) to (B, S, D)."""

SCALE = 0.01
"""Initial factor on the coefficients that depend on the position (both papers)."""
NORM_EPS = 1e-5
KEPT = 0.9
"""Initial share that each stream keeps of itself, where the mixing matrix is doubly stochastic."""


def expanded(x: Tensor, streams: int) -> Tensor:
    """(B, S, D) to n equal streams (B, S, n, D); a single one stays as it is."""
    # Contiguous, as a pipeline sends it
    return x if streams == 1 else x.unsqueeze(-2).expand(*x.shape[:-1], streams, -1).contiguous()


def collapsed(x: Tensor, streams: int) -> Tensor:
    """(B, S, n, D) to the sum of the streams (B, S, D); a single one stays as it is."""
    return x if streams == 1 else x.sum(-2)


@directly_callable
class Addition(nn.Module):
    """x + f(x)."""

    def forward(self, x: Tensor, branch: Branch) -> Tensor:
        """(B, S, D) to (B, S, D)."""
        return x + branch(x)


class HyperConnection(nn.Module):
    """Hyper-connections: a part reads A_mᵀ H, and the streams become A_rᵀ H + Bᵀ f(A_mᵀ H).

    `static` and the rows of `dynamic` have A_m, A_r and B in this order, as columns n x (1 + n + 1). `static` is their
    difference from the initial values, so that it starts at zero.
    """

    start: Tensor
    """The initial coefficients (n, n + 2): A_m reads one stream, A_r is the identity, and B is 1."""

    def __init__(self, dim: int, streams: int, *, part: int, dynamic: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.dim, self.streams, self.part = dim, streams, part
        self.static = nn.Parameter(torch.empty(streams, streams + 2))
        self.dynamic = nn.Parameter(torch.empty(streams + 2, dim)) if dynamic else None
        self.scale = nn.Parameter(torch.empty(2)) if dynamic else None
        """Factors on the tanh: of A_m and A_r, and of B."""
        # Not in checkpoints: constants, which `init_buffers` makes again
        self.register_buffer("start", torch.empty(streams, streams + 2, dtype=_wide(dtype)), persistent=False)

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Fills `scale` with 0.01 and all others with 0: the module begins as plain addition."""
        fill.constant(SCALE if name == "scale" else 0.0)

    def init_buffers(self, device: torch.device) -> None:
        """Makes the initial coefficients."""
        eye = torch.eye(self.streams, dtype=self.start.dtype, device=device)
        read = eye[:, self.part % self.streams, None]
        self.start = torch.cat([read, eye, torch.ones_like(read)], 1)

    def forward(self, x: Tensor, branch: Branch) -> Tensor:
        """(B, S, n, D) to the same; `branch` is called once, with what the part reads."""
        h = x if self.streams > 1 else x.unsqueeze(-2)
        read, mix, write = self.coefficients(h).to(h.dtype).split([1, self.streams, 1], -1)
        added = branch((read.mT @ h).squeeze(-2))
        h = mix.mT @ h + write * added.unsqueeze(-2)
        return h if self.streams > 1 else h.squeeze(-2)

    def coefficients(self, h: Tensor) -> Tensor:
        """Returns A_m, A_r and B of streams (B, S, n, D): (n, n + 2), or (B, S, n, n + 2) if they are dynamic."""
        static = self.start + _widened(self.static, h)
        if self.dynamic is None or self.scale is None:
            return static
        # The product is of the width of the model and so in its dtype; what follows is small
        normed = F.layer_norm(h, (self.dim,), eps=NORM_EPS)
        moved = F.linear(normed, cast(self.dynamic, h.dtype)).to(static.dtype).tanh()
        of_streams, of_part = _widened(self.scale, h).unbind()
        return static + moved * torch.cat([of_streams.expand(self.streams + 1), of_part[None]])

    def flops(self, seq_len: int) -> float:
        """Counts 6 for each coefficient that multiplies a feature, and 6 for each weight of its computation."""
        return 6.0 * self.dim * self.streams * (self.streams + 2) * (1 if self.dynamic is None else 2)

    def parameter_roles(self) -> Mapping[str, Role]:
        """Returns the roles by which only `dynamic`, a hidden matrix, has weight decay, as in the paper."""
        return {"static": "bias", **({"dynamic": "matrix", "scale": "norm"} if self.dynamic is not None else {})}

    def extra_repr(self) -> str:
        return f"streams={self.streams}, dynamic={self.dynamic is not None}"


class ManifoldHyperConnection(nn.Module):
    """mHC: a part reads pre · H, and the streams become Mᵀ H + post f(pre · H) with a doubly stochastic M.

    Rows of `weight` and entries of `bias` are in this order: n of pre, n of post, n x n of M. `bias` is the difference
    from the initial values, so that it starts at zero.
    """

    start: Tensor
    """The initial biases: pre averages the streams, post is 1, and M keeps `KEPT` of each stream."""

    def __init__(
        self,
        dim: int,
        streams: int,
        *,
        iterations: int,
        eps: float,
        norm_eps: float,
        std: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.dim, self.streams, self.iterations = dim, streams, iterations
        self.eps, self.norm_eps, self.std = eps, norm_eps, std
        count = streams * (2 + streams)
        self.weight = nn.Parameter(torch.empty(count, streams * dim))
        self.bias = nn.Parameter(torch.empty(count))
        self.scale = nn.Parameter(torch.empty(3))
        """Factors on what `weight` makes of pre, post and M."""
        self.register_buffer("start", torch.empty(count, dtype=_wide(dtype)), persistent=False)

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Draws `weight`, since equal streams with equal coefficients would learn alike."""
        if name == "weight":
            fill.normal(self.std)
        else:
            fill.constant(SCALE if name == "scale" else 0.0)

    def init_buffers(self, device: torch.device) -> None:
        """Makes the initial biases: logits of a sigmoid for pre and post, logarithms up to a constant for M."""
        n = self.streams
        eye = torch.eye(n, dtype=self.start.dtype, device=device)
        post = torch.zeros_like(eye[0])
        # The softmax of a row then has KEPT on the diagonal: e / (e + n - 1) = KEPT
        mix = eye * math.log(KEPT / (1 - KEPT) * (n - 1))
        # The sigmoid of -log(n - 1) is 1 / n, and twice the one of 0 is 1
        self.start = torch.cat([post - math.log(n - 1), post, mix.flatten()])

    def forward(self, x: Tensor, branch: Branch) -> Tensor:
        """(B, S, n, D) to the same; `branch` is called once, with what the part reads."""
        pre, post, mix = (part.to(x.dtype) for part in self.coefficients(x))
        added = branch((pre.unsqueeze(-2) @ x).squeeze(-2))
        return mix.mT @ x + post.unsqueeze(-1) * added.unsqueeze(-2)

    def coefficients(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns pre (B, S, n), post (B, S, n) and M (B, S, n, n) of streams (B, S, n, D)."""
        n, bias = self.streams, self.start + _widened(self.bias, x)
        # The product is of the width of the model and so in its dtype; what follows is small
        normed = F.rms_norm(x.flatten(-2), (n * self.dim,), eps=self.norm_eps)
        logits = F.linear(normed, cast(self.weight, x.dtype)).to(bias.dtype)
        parts = zip(*(part.split([n, n, n * n], -1) for part in (logits, bias)), _widened(self.scale, x), strict=True)
        pre, post, mix = (own * factor + offset for own, offset, factor in parts)
        return pre.sigmoid() + self.eps, 2 * post.sigmoid(), self.doubly_stochastic(mix.unflatten(-1, (n, n)))

    def doubly_stochastic(self, logits: Tensor) -> Tensor:
        """Returns exp(logits) (…, n, n) with rows and columns that sum to 1, which the iterations approach."""
        # softmax is exp with its rows normalised, the first half of an iteration, and cannot overflow
        matrix = logits.softmax(-1) + self.eps
        matrix = matrix / (matrix.sum(-2, keepdim=True) + self.eps)
        for _ in range(self.iterations - 1):
            matrix = matrix / (matrix.sum(-1, keepdim=True) + self.eps)
            matrix = matrix / (matrix.sum(-2, keepdim=True) + self.eps)
        return matrix

    def flops(self, seq_len: int) -> float:
        """Counts 6 for each coefficient that multiplies a feature, and 6 for each weight of its computation."""
        return 6.0 * self.dim * self.streams * (self.streams + 2) * (1 + self.streams)

    def parameter_roles(self) -> Mapping[str, Role]:
        """Returns the roles by which `weight` is a hidden matrix, and nothing else has weight decay."""
        return {"weight": "matrix", "bias": "bias", "scale": "norm"}

    def extra_repr(self) -> str:
        return f"streams={self.streams}, iterations={self.iterations}"


def _widened(parameter: Tensor, x: Tensor) -> Tensor:
    """Returns a parameter in the dtype of coefficients, rounded to the dtype of x first, in which FSDP gathers it."""
    # The rounding leaves small differences from the initial values their digits, of which it would cost 1 + d most
    return cast(parameter, x.dtype).to(_wide(x.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
