"""Matrices with a low-rank adapter beside them.

Shapes: (…, in) activations, (out, in) weights, r the rank; stacks of experts have a dimension E before these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_core.parallel.mesh import local_part
from forge_kit.nn.adapters import HasAdapter, put_before, resized
from forge_kit.nn.modules import cast
from forge_kit.torch_internals import parameters_of
from forge_plugin_lora.nf4_matrix import InNF4, store

if TYPE_CHECKING:
    from forge_core.contracts.model import Fill
    from forge_kit.nn.modules import MatrixShard

A, B, MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"
"""Names of the modules that an adapted one gets."""


class Magnitude(nn.Module):
    """What training adds to the norm of each row of a weight; `weight` is (out,) and starts at zero."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows))

    def init_parameter(self, name: str, fill: Fill) -> None:
        fill.constant(0.0)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self) -> Tensor:
        """Returns the weight: by a call, in which a stage replaces it by this rank's part."""
        return self.weight


class LowRank(HasAdapter):
    """W x + b + s B A x (Hu et al. 2021, equation 3). A base put before the module's own class, which computes W x + b.

    A is (r, in), `lora_a`; B is (out, r), `lora_b`, and starts at zero. It changes the class instead of adding a
    forward hook, so that a stage which shares a sum over ranks includes the adapter's part in it.
    """

    weight: Tensor
    lora_a: Any
    lora_b: Any
    lora_scale: float

    def forward(self, x: Tensor, *further: Any) -> Tensor:
        """`further`: what the module's own class takes, such as where the rows of each expert end."""
        y: Tensor = super().forward(x, *further)  # type: ignore[misc]
        return y + self._update(x, *further) if self.adapter_on else y

    def _update(self, x: Tensor, *further: Any) -> Tensor:
        return self.lora_scale * self.lora_b(self.lora_a(x, *further), *further)

    def merged_weight(self) -> Tensor:
        """See `forge_kit.nn.adapters.MergesAdapter`."""
        weight, update = self._wide()
        return weight + update

    def _wide(self) -> tuple[Tensor, Tensor]:
        """W and s B A, this rank's part of them, in float32 or wider."""
        update = self.lora_scale * (_wide(self.lora_b.weight) @ _wide(self.lora_a.weight))
        return self.dequantised(update.dtype) if isinstance(self, InNF4) else _wide(self.weight), update

    def adapter_parameters(self) -> Iterator[str]:
        """See `forge_kit.nn.adapters.MergesAdapter`."""
        for name in (A, B, MAGNITUDE):
            if isinstance(getattr(self, name, None), nn.Module):
                yield f"{name}.weight"


def _wide(part: Tensor) -> Tensor:
    return local_part(part.detach()).to(torch.promote_types(part.dtype, torch.float32))


class Decomposed(LowRank):
    """m (W + s B A) x / |W + s B A| + b, norms and m by row (DoRA, Liu et al. 2024, equation 5).

    m is |W| plus the parameter of `lora_magnitude`: it starts at the norms of W without a pass over W before training.
    As in section 4.3 of the paper, no gradient flows through the norms.
    """

    lora_magnitude: Any
    matrix_shard: MatrixShard | None = None

    def forward(self, x: Tensor, *further: Any) -> Tensor:
        """(…, in) to (…, out)."""
        if not self.adapter_on:
            return super().forward(x, *further)
        # The bias is no row's length: left out of what is scaled
        bias = parameters_of(self).get("bias")
        if bias is None:
            return super().forward(x, *further) * cast(self._factor(), x.dtype)
        parameters_of(self)["bias"] = None
        try:
            y = super().forward(x, *further)
        finally:
            parameters_of(self)["bias"] = bias
        return y * cast(self._factor(), x.dtype) + cast(bias, x.dtype)

    def _factor(self) -> Tensor:
        """(out,): m over the norm of each row, in float32 or wider."""
        with torch.no_grad():
            weight, update = self._wide()
            # Stacked, so that ranks of columns reduce once for both norms
            squares = torch.stack([weight.square().sum(-1), (weight + update).square().sum(-1)])
            before, after = self._over_columns(squares).sqrt()
        magnitude: Tensor = self.lora_magnitude()
        # A row of zeros has the norm 0, and 0 / 0 would be no number
        return (before + magnitude.to(before.dtype)) / after.clamp(min=torch.finfo(after.dtype).tiny)

    def row_norms(self) -> Tensor:
        """Returns the norms of this rank's rows of W, (out,), float32 or wider. Collective among ranks of columns."""
        return self._over_columns(self._wide()[0].square().sum(-1)).sqrt()

    def _over_columns(self, sums: Tensor) -> Tensor:
        if self.matrix_shard is not None and self.matrix_shard.dimension == 1:
            # Each rank has some columns of every row
            dist.all_reduce(sums, group=self.matrix_shard.group)
        return sums

    def merged_weight(self) -> Tensor:
        """See `forge_kit.nn.adapters.MergesAdapter`."""
        weight, update = self._wide()
        return self._factor().detach().unsqueeze(-1) * (weight + update)


def adapt(module: Any, rank: int, scale: float, *, decomposed: bool, in_nf4: bool = False) -> None:
    """Put an adapter beside the matrix of a module, by a class derived from its own; see `LowRank`, `Decomposed`.

    With `in_nf4`, the matrix is stored in NF4.
    """
    *stack, outputs, inputs = module.weight.shape
    # The deviation of peft's and the authors' draw, uniform within 1/sqrt(in) (`kaiming_uniform_` with a = sqrt(5)).
    parts = {
        A: resized(module, inputs, rank, std=1 / math.sqrt(3 * inputs)),
        B: resized(module, rank, outputs, std=0.0),
    }
    for name, part in parts.items():
        assert part is not None, "the targets were selected among adaptable modules"
        setattr(module, name, part)
    if decomposed:
        assert not stack, "refused when the targets were selected"
        module.lora_magnitude = Magnitude(outputs)
    module.lora_scale = scale
    if in_nf4:
        store(module)
    put_before(Decomposed if decomposed else LowRank, module)
