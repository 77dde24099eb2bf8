"""Norms of parameters, gradients and updates by group, over all ranks of any layout.

Shapes: P parameters of this rank, G groups of the whole model, K kinds of norms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_core.contracts.model import Model, Role
from forge_core.contracts.optimizer import roles_of
from forge_core.parallel.mesh import gather_objects, local_part, world_size
from forge_plugin_taps.selection import in_order


class TensorNorms:
    """Sums of squares of this rank's tensors, weighted so that the sum over all ranks counts each element once."""

    def __init__(self, model: Model, device: torch.device, by: str) -> None:
        """Agree on groups and copies. Collective.

        Args:
            model: after all stages; parameters that are no floating-point numbers, such as 4-bit weights, are left out.
            device: of the sums.
            by: "role", "part" or "parameter", as `TrainingStats.by`.
        """
        # A rank of a pipeline may list a tied parameter by its other name, which the first rank does not have
        roles, ties = roles_of(model), dict(model.tied_parameters())
        named = [
            (ties.get(name, name), name, each) for name, each in model.named_parameters() if each.is_floating_point()
        ]
        self._parameters = [parameter for *_, parameter in named]
        own = {name: (_group(name, roles[as_listed], by), *_sizes(each)) for name, as_listed, each in named}
        every = gather_objects(own)
        # A parameter may be whole on each of several ranks, divided among them, or both. The elements that all of them
        # have, over its size, are the number of its copies under any layout, also of a tied one in a pipeline.
        held: Counter[str] = Counter()
        for part in every:
            held.update({name: here for name, (_, here, _) in part.items()})
        self.groups: Sequence[str] = _ordered({group for part in every for group, *_ in part.values()})
        """Names of all ranks' groups, layers by number."""
        numbers = {group: number for number, group in enumerate(self.groups)}
        shares = [size / max(held[name], 1) for name, (_, _, size) in own.items()]
        self._device = device
        self._index = torch.tensor([numbers[group] for group, *_ in own.values()], device=device, dtype=torch.int64)
        self._shares = torch.tensor(shares, device=device, dtype=torch.float64)

    def weights(self) -> list[Tensor]:
        """This rank's parts of the parameters."""
        return [local_part(parameter.detach()) for parameter in self._parameters]

    def gradients(self) -> list[Tensor | None]:
        """This rank's parts of the gradients; None where there is none."""
        return [None if each.grad is None else local_part(each.grad.detach()) for each in self._parameters]

    def squares(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Sums of squares by group, (G,) float64: of P tensors, of which None counts as 0."""
        zero = torch.zeros((), device=self._device, dtype=torch.float64)
        norms = [zero if tensor is None else self._norm(tensor) for tensor in tensors]
        sums = torch.zeros(len(self.groups), device=self._device, dtype=torch.float64)
        # `stack` takes no empty list, and a rank of a pipeline may have no parameter
        if not norms:
            return sums
        return sums.index_add_(0, self._index, torch.stack(norms).square() * self._shares)

    def changes(self, before: list[Tensor | None]) -> Tensor:
        """The same of the differences between the weights and copies of earlier ones, which are used up."""
        for number, (earlier, now) in enumerate(zip(before, self.weights(), strict=True)):
            # In place, and each freed before the next: no further copy of the weights
            before[number] = None if earlier is None else self._norm(earlier.sub_(now))
        return self.squares(before)

    def over_ranks(self, sums: Sequence[Tensor]) -> Tensor:
        """Norms of the whole model, (K, G + 1), from K sums of this rank; last column: all groups. Collective."""
        together = torch.stack(list(sums))
        if world_size() > 1:
            dist.all_reduce(together)
        return torch.cat([together, together.sum(1, keepdim=True)], 1).sqrt()

    def _norm(self, tensor: Tensor) -> Tensor:
        # bfloat16 would lose most digits of a sum; squares are added up in float64 afterwards
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        return torch.linalg.vector_norm(tensor, dtype=dtype).to(self._device, torch.float64, non_blocking=True)


def _sizes(parameter: nn.Parameter) -> tuple[int, int]:
    """Elements that this rank has, and elements of the whole parameter."""
    return local_part(parameter).numel(), parameter.numel()


def _group(name: str, role: Role, by: str) -> str:
    """The group of a parameter: its layer, and the group within."""
    parts = name.split(".")
    # The first number: experts of a layer may be numbered, too
    at = next((number for number, part in enumerate(parts) if part.isdigit()), 0)
    layer, rest = ".".join(parts[: at + 1]), parts[at + 1 :]
    inner = {"role": role, "part": rest[0] if rest else role, "parameter": ".".join(rest)}[by]
    return f"{layer}/{inner}" if inner else layer


def _ordered(groups: set[str]) -> list[str]:
    places = {layer: number for number, layer in enumerate(in_order(group.partition("/")[0] for group in groups))}
    return sorted(groups, key=lambda group: (places[group.partition("/")[0]], group))
