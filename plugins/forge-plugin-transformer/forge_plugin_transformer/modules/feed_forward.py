"""Feed-forward parts of a block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from forge_kit.nn.direct_calls import directly_callable
from forge_kit.nn.modules import Linear
from forge_kit.nn.taps import TapPoint

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_plugin_transformer.kinds import InitStd


@directly_callable
class GatedFeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, hidden: int, *, bias: bool, init: InitStd) -> None:
        super().__init__()
        self.gate = Linear(dim, hidden, bias=bias, std=init.inner)
        self.up = Linear(dim, hidden, bias=bias, std=init.inner)
        self.down = Linear(hidden, dim, bias=bias, std=init.residual)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(B, S, D) to (B, S, D), each position by itself; nothing of `batch` is used."""
        return self.down(self.activation(self.gate(x)) * self.up(x))

    def activation(self, gate: Tensor) -> Tensor:
        """Returns the factors on `up(x)`, from `gate(x)`."""
        return F.silu(gate)

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        """Ranks divide the hidden features; `down` sums their parts of the result."""
        # Both by columns: a rank has gate and factor of the same hidden features, and needs no others for the product
        return {"": "whole_input", "gate": "column", "up": "column", "down": "row"}

    def tap_points(self) -> Mapping[str, TapPoint]:
        """The hidden features (B, S, hidden) after the product with the gate, as `down` receives them."""
        return {"mlp_hidden": TapPoint("down", "input", axes="hidden")}


@directly_callable
class GELUGatedFeedForward(GatedFeedForward):
    """down(gelu(gate(x)) * up(x))."""

    def __init__(self, dim: int, hidden: int, *, bias: bool, approximate: str, init: InitStd) -> None:
        super().__init__(dim, hidden, bias=bias, init=init)
        self.approximate = approximate

    def activation(self, gate: Tensor) -> Tensor:
        """Returns gelu(gate), by its tanh approximation or exactly."""
        return F.gelu(gate, approximate=self.approximate)


class TwoMatrices(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, dim: int, hidden: int, *, bias: bool, init: InitStd) -> None:
        super().__init__()
        self.up = Linear(dim, hidden, bias=bias, std=init.inner)
        self.down = Linear(hidden, dim, bias=bias, std=init.residual)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(B, S, D) to (B, S, D), each position by itself; nothing of `batch` is used."""
        return self.down(self.activation(self.up(x)))

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
