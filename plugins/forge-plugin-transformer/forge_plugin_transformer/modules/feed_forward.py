"""Feed-forward parts of a block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_kit.nn.direct_calls import directly_callable
from forge_kit.nn.modules import Linear, cast
from forge_kit.nn.taps import TapPoint
from forge_plugin_transformer.modules.parts import last_parameters

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Fill, Role
    from forge_plugin_transformer.kinds import InitStd

BETA, EPS = 0.5, -1e-6
"""Of xIELU."""


class TwoSteps(nn.Module):
    """Base of feed-forward parts; see `forge_plugin_transformer.modules.parts.InTwoSteps`."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(B, S, D) to (B, S, D), each position by itself; nothing of `batch` is used."""
        return self.finish(self.project(x, batch), x, batch)

    def project(self, x: Tensor, batch: Batch) -> Sequence[Tensor]:
        """Returns hidden features before the activation, (B, S, hidden) each."""
        raise NotImplementedError

    def finish(self, projected: Sequence[Tensor], x: Tensor, batch: Batch) -> Tensor:
        """The features of `project` -> (B, S, D)."""
        raise NotImplementedError

    def stream_writers(self) -> Sequence[str]:
        """Names the parameters of `down`, the last matrix of each of them."""
        return last_parameters(self, "down")

    def unit_scale(self, seq_len: int) -> float | None:
        """Returns one over the size of the hidden features at the start; None where no paper states it."""
        return None


@directly_callable
class GatedFeedForward(TwoSteps):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, hidden: int, *, bias: bool, init: InitStd) -> None:
        super().__init__()
        self.gate = Linear(dim, hidden, bias=bias, std=init.inner)
        self.up = Linear(dim, hidden, bias=bias, std=init.inner)
        self.down = Linear(hidden, dim, bias=bias, std=init.residual)

    def project(self, x: Tensor, batch: Batch) -> Sequence[Tensor]:
        """Returns `gate(x)` and `up(x)`."""
        return self.gate(x), self.up(x)

    def finish(self, projected: Sequence[Tensor], x: Tensor, batch: Batch) -> Tensor:
        """As `TwoSteps`."""
        gate, up = projected
        return self.down(self.activation(gate) * up)

    def projected_widths(self) -> Mapping[str, int]:
        """Names both, as wide as on all ranks."""
        return {"gate": self.gate.out_features, "up": self.up.out_features}

    def activation(self, gate: Tensor) -> Tensor:
        """Returns the factors on `up(x)`, from `gate(x)`."""
        return F.silu(gate)

    def unit_scale(self, seq_len: int) -> float | None:
        """As u-muP has it (Blake et al. 2024): between 1/2 for flat gates and 1/sqrt(2) for sharp ones."""
        # Of this activation alone
        return 2**0.75 if type(self) is GatedFeedForward else None

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        """Ranks divide the hidden features; `down` sums their parts of the result."""
        # Both by columns: a rank has gate and factor of the same hidden features, and needs no others for the product
        return {"": "whole_input", "gate": "column", "up": "column", "down": "row"}

    def tap_points(self) -> Mapping[str, TapPoint]:
        """The hidden features (B, S, hidden) after the product with the gate, as `down` receives them."""
        return {"mlp_hidden": TapPoint("down", "input", axes="hidden")}


@directly_callable
class ScaledGatedFeedForward(GatedFeedForward):
    """scale down(silu(gate_scale gate(x)) * up(x))."""

    def __init__(self, dim: int, hidden: int, *, bias: bool, init: InitStd, gate_scale: float, scale: float) -> None:
        super().__init__(dim, hidden, bias=bias, init=init)
        self.gate_scale, self.scale = gate_scale, scale

    def finish(self, projected: Sequence[Tensor], x: Tensor, batch: Batch) -> Tensor:
        """As `GatedFeedForward`, with both factors."""
        gate, up = projected
        return self.down(self.activation(gate * self.gate_scale) * up) * self.scale


@directly_callable
class GELUGatedFeedForward(GatedFeedForward):
    """down(gelu(gate(x)) * up(x))."""

    def __init__(
        self, dim: int, hidden: int, *, bias: bool, approximate: str, init: InitStd, sparsity: float = 0.0
    ) -> None:
        super().__init__(dim, hidden, bias=bias, init=init)
        self.approximate = approximate
        self.sparse = GaussianTopK(hidden, sparsity) if sparsity else None

    def activation(self, gate: Tensor) -> Tensor:
        """Returns gelu(gate), by its tanh approximation or exactly."""
        return F.gelu(gate if self.sparse is None else self.sparse(gate), approximate=self.approximate)

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        """Ranks divide the hidden features, and add up what mean and deviation of all are computed from."""
        if self.sparse is None:
            return super().tensor_parallel_plan()
        return {**super().tensor_parallel_plan(), "sparse": "split_sum"}


class GaussianTopK(nn.Module):
    """relu(x - mean - k std) over the last dimension, which leaves about the share 1 - s of a normal variable."""

    def __init__(self, features: int, sparsity: float) -> None:
        super().__init__()
        self.features, self.sparsity = features, sparsity
        self.deviations = NormalDist().inv_cdf(sparsity)

    def forward(self, x: Tensor) -> Tensor:
        """(…, all features, or a rank's) to the same; mean and deviation are of all."""
        wide = cast(x, torch.promote_types(x.dtype, torch.float32))
        centred = wide - self.sum_features(wide) / self.features
        # The deviation without Bessel's correction, as in Gemma 3n
        deviation = (self.sum_features(centred.square()) / self.features).sqrt()
        return cast(F.relu(centred - deviation * self.deviations), x.dtype)

    def sum_features(self, x: Tensor) -> Tensor:
        """Returns the sum over all features of x (…, this rank's): (…, 1)."""
        return x.sum(-1, keepdim=True)

    def extra_repr(self) -> str:
        return f"{self.features}, sparsity={self.sparsity}"


class TwoMatrices(TwoSteps):
    """down(activation(up(x)))."""

    def __init__(self, dim: int, hidden: int, *, bias: bool, init: InitStd) -> None:
        super().__init__()
        self.up = Linear(dim, hidden, bias=bias, std=init.inner)
        self.down = Linear(hidden, dim, bias=bias, std=init.residual)

    def project(self, x: Tensor, batch: Batch) -> Sequence[Tensor]:
        """Returns `up(x)`."""
        return (self.up(x),)

    def finish(self, projected: Sequence[Tensor], x: Tensor, batch: Batch) -> Tensor:
        """As `TwoSteps`."""
        [up] = projected
        return self.down(self.activation(up))

    def projected_widths(self) -> Mapping[str, int]:
        """Names it, as wide as on all ranks."""
        return {"up": self.up.out_features}

    def activation(self, x: Tensor) -> Tensor:
        """Returns the hidden features, from `up(x)`."""
        raise NotImplementedError

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        """Ranks divide the hidden features; `down` sums their parts of the result."""
        return {"": "whole_input", "up": "column", "down": "row"}

    def tap_points(self) -> Mapping[str, TapPoint]:
        """The hidden features (B, S, hidden) after the activation."""
        return {"mlp_hidden": TapPoint("down", "input", axes="hidden")}


@directly_callable
class PlainFeedForward(TwoMatrices):
    """down(gelu(up(x)))."""

    def __init__(self, dim: int, hidden: int, *, bias: bool, approximate: str, init: InitStd) -> None:
        super().__init__(dim, hidden, bias=bias, init=init)
        self.approximate = approximate

    def activation(self, x: Tensor) -> Tensor:
        """Returns gelu(x), by its tanh approximation or exactly."""
        return F.gelu(x, approximate=self.approximate)


@directly_callable
class SquaredReLUFeedForward(TwoMatrices):
    """down(relu(up(x))²)."""

    def activation(self, x: Tensor) -> Tensor:
        """Returns relu(x)²."""
        return F.relu(x).square()


class XIELUActivation(nn.Module):
    """a x² + b x where x > 0, and c (exp(x) - 1 - x) + b x elsewhere; a and c are learned.

    A separate module, of which tensor-parallel ranks have all parameters and some of the features.
    """

    beta: Tensor
    eps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = (nn.Parameter(torch.empty(1)) for _ in range(2))
        # In checkpoints, as published files have them, rounded to their dtype
        self.register_buffer("beta", torch.empty(()))
        self.register_buffer("eps", torch.empty(()))

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Fills both so that a and c are 0.8."""
        # The inverse of softplus
        fill.constant(math.log(math.expm1(0.8 if name == "alpha_p" else 0.8 - BETA)))

    def init_buffers(self, device: torch.device) -> None:
        """Fills b, and the number next to 0 from which on the exponential is taken."""
        self.beta.fill_(BETA)
        self.eps.fill_(EPS)

    def forward(self, x: Tensor) -> Tensor:
        """(…) to (…), computed in float32 or wider: exp(x) - 1 - x has few digits of a small x."""
        wide = cast(x, torch.promote_types(x.dtype, torch.float32))
        beta, eps = cast(self.beta, wide.dtype), cast(self.eps, wide.dtype)
        rising = F.softplus(cast(self.alpha_p, wide.dtype)) * wide.square()
        # Bounded, as both branches are computed: exp of a large x is infinite, and its gradient times 0 no number
        falling = (beta + F.softplus(cast(self.alpha_n, wide.dtype))) * (torch.expm1(torch.minimum(wide, eps)) - wide)
        return cast(torch.where(wide > 0, rising, falling) + beta * wide, x.dtype)


@directly_callable
class XIELUFeedForward(TwoMatrices):
    """down(xielu(up(x)))."""

    def __init__(self, dim: int, hidden: int, *, init: InitStd) -> None:
        super().__init__(dim, hidden, bias=False, init=init)
        self.act = XIELUActivation()

    def activation(self, x: Tensor) -> Tensor:
        """Returns xielu(x)."""
        activated: Tensor = self.act(x)
        return activated

    def parameter_roles(self) -> Mapping[str, Role]:
        """Makes the slopes biases: by their shape they would have the role of norms."""
        return {"act.alpha_p": "bias", "act.alpha_n": "bias"}

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        """Ranks divide the hidden features, of which all have the same slopes."""
        return {**super().tensor_parallel_plan(), "act": "replicate"}
