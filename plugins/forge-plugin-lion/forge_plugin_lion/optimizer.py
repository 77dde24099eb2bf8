"""Lion as a `torch.optim.Optimizer`.

With gradient g, momentum m and parameter p, a step of the paper is

    u = sign(β₁ m + (1 - β₁) g);  p ← p - lr (λ p + u);  m ← β₂ m + (1 - β₂) g

The cautious variant takes s φ u for u, where φ is 1 where u g > 0 and else 0, and s = dim(p) / (Σφ + 1). The sum is
over the whole parameter, however it is split.

These are five cheap passes over memory, whose speed is all that counts on a CPU. There a step goes through each
parameter in blocks that stay in the cache from the first pass to the last. Elsewhere each pass is one kernel for many
parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from forge_core.parallel.mesh import local_part

CPU_BLOCK = 1 << 18
"""Elements of a block for each thread: 1 MiB of each float32 tensor. Fewer are slower, as the threads meet once a pass;
four times as many are no faster."""
KERNEL_ELEMENTS = 1 << 26
"""Elements that one kernel goes over elsewhere, at least one tensor: the update of so many exists at a time."""


class LionOptimizer(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, algorithm 2), with its cautious variant (Liang et al. 2024, algorithm 1).

    State: `exp_avg`, like each parameter. Parameters without a gradient are left as they are.

    Args:
        groups: may each have an `lr`, `betas`, `weight_decay` and `cautious` of their own.
        lr: how far every element moves.
        betas: β₁ of the update and β₂ of the momentum.
        weight_decay: each step takes lr x this of a parameter away.
        cautious: move only elements whose update agrees in sign with their gradient.
    """

    def __init__(
        self,
        groups: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        cautious: bool = False,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "cautious": cautious})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Where parameters are split and the update is cautious,
        collective over the ranks that share them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            parts = [self._part(parameter) for parameter in parameters]
            if group["cautious"]:
                scales = _scales(parameters, parts, group["betas"][0])
                parts = [part._replace(scale=scale) for part, scale in zip(parts, scales, strict=True)]
            for batch in _batches(parts):
                _update(batch, **{key: group[key] for key in ("lr", "betas", "weight_decay")})
        return loss

    def _part(self, parameter: nn.Parameter) -> _Part:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return _Part(local_part(parameter), local_part(parameter.grad), local_part(state["exp_avg"]))


class _Part(NamedTuple):
    """What a rank has of a parameter, or a block of it."""

    parameter: Tensor
    gradient: Tensor
    momentum: Tensor
    scale: Tensor | None = None
    """() how much further than the rate elements move that move; None: all move, by the rate."""


def _update(parts: Sequence[_Part], lr: float, betas: tuple[float, float], weight_decay: float) -> None:
    parameters, gradients, momenta, scales = (list(column) for column in zip(*parts, strict=True))
    updates = _directions(parts, betas[0])
    if scales[0] is not None:
        torch._foreach_mul_(updates, _agreement(updates, gradients))
        torch._foreach_mul_(updates, scales)
    if weight_decay:
        torch._foreach_mul_(parameters, 1 - lr * weight_decay)
    torch._foreach_add_(parameters, updates, alpha=-lr)
    torch._foreach_lerp_(momenta, gradients, 1 - betas[1])


def _directions(parts: Sequence[_Part], beta: float) -> list[Tensor]:
    """sign(β m + (1 - β) g). The sign lets both be divided by 1 - β, which makes one cheap pass of it."""
    gradients, momenta = [part.gradient for part in parts], [part.momentum for part in parts]
    updates = list(torch._foreach_add(gradients, momenta, alpha=beta / (1 - beta)))
    torch._foreach_sign_(updates)
    return updates


def _agreement(updates: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """1 where an update and its gradient have the same sign, else 0. Comparisons would take several times as long."""
    agreement = list(torch._foreach_mul(updates, gradients))
    torch._foreach_sign_(agreement)
    torch._foreach_clamp_min_(agreement, 0)
    return agreement


def _scales(parameters: Sequence[nn.Parameter], parts: Sequence[_Part], beta: float) -> list[Tensor]:
    """dim(p) / (Σφ + 1) of each parameter, in its dtype."""
    counts = []
    for part in parts:
        dtype = torch.promote_types(part.parameter.dtype, torch.float32)
        count = torch.zeros((), dtype=torch.float64, device=part.parameter.device)
        for batch in _batches([part]):
            agreement = _agreement(_directions(batch, beta), [block.gradient for block in batch])
            count += sum(block.sum(dtype=dtype) for block in agreement)
        counts.append(count)
    _add_over_ranks(parameters, counts)
    pairs = zip(parameters, counts, strict=True)
    return [(parameter.numel() / (count + 1)).to(parameter.dtype) for parameter, count in pairs]


def _add_over_ranks(parameters: Sequence[nn.Parameter], counts: Sequence[Tensor]) -> None:
    """Add each count over the ranks among which its parameter is split, in place."""
    split: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter, count in zip(parameters, counts, strict=True):
        if isinstance(parameter, DTensor):
            placements = enumerate(parameter.placements)
            groups = tuple(parameter.device_mesh.get_group(i) for i, at in placements if not at.is_replicate())
            split[groups].append(count)
    for groups, own in split.items():
        total = torch.stack(own)
        for group in groups:
            dist.all_reduce(total, group=group)
        torch._foreach_copy_(own, list(total.unbind()))


def _batches(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """What to go over at a time."""
    batch: list[_Part] = []
    for part in parts:
        if part.parameter.device.type == "cpu":
            yield from ([block] for block in _blocks(part))
            continue
        if batch and sum(other.parameter.numel() for other in batch) + part.parameter.numel() > KERNEL_ELEMENTS:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


def _blocks(part: _Part) -> Iterator[_Part]:
    """A part block by block, each a view; whole where its tensors are not laid out alike."""
    tensors = part[:3]
    if not all(tensor.is_contiguous() for tensor in tensors):
        yield part
        return
    size = CPU_BLOCK * torch.get_num_threads()
    for blocks in zip(*(tensor.view(-1).split(size) for tensor in tensors), strict=True):
        yield _Part(*blocks, scale=part.scale)
