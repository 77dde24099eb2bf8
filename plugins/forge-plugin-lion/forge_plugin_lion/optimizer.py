"""Lion as a `torch.optim.Optimizer`.

With gradient g, momentum m and parameter p, a step of the paper is

    u = sign(β₁ m + (1 - β₁) g);  p ← p - lr (λ p + u);  m ← β₂ m + (1 - β₂) g

The cautious variant takes s φ u for u, where φ is 1 where u g > 0 and else 0, and s = dim(p) / (Σφ + 1). The sum is
over the whole parameter, on all ranks that share it.

A step is five passes over memory with little arithmetic. On a CPU it goes through the parameters in blocks that stay in
the cache from the first pass to the last. Elsewhere each pass is one kernel over many parameters.
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
from forge_kit.torch_internals import (
    foreach_add,
    foreach_add_,
    foreach_clamp_min_,
    foreach_copy_,
    foreach_lerp_,
    foreach_mul,
    foreach_mul_,
    foreach_sign_,
)

CPU_BLOCK = 1 << 18
"""Elements of a block for each thread: a MiB of each float32 tensor. Twice as many are as fast."""
KERNEL_ELEMENTS = 1 << 26
"""Elements that one kernel updates on other devices, or one tensor; the updates of a kernel exist at the same time."""


class LionOptimizer(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, algorithm 2), with its cautious variant (Liang et al. 2024, algorithm 1).

    State: `exp_avg`, like each parameter. Parameters without a gradient are not changed.

    Args:
        groups: parameters, or groups of them, which may set `lr`, `betas`, `weight_decay` and `cautious`.
        lr: distance that every element moves.
        betas: β₁ of the update and β₂ of the momentum.
        weight_decay: decoupled; each step subtracts lr x this x the parameter.
        cautious: whether only elements move whose update agrees in sign with their gradient.
    """

    def __init__(
        self,
        groups: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        cautious: bool = False,
    ) -> None:
        self._scratch = _Scratch()
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "cautious": cautious})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Collective over the ranks that share parameters if the update is cautious.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            parts = [self._part(parameter) for parameter in parameters]
            if group["cautious"]:
                scales = self._scales(parameters, parts, group["betas"][0])
                parts = [part._replace(scale=scale) for part, scale in zip(parts, scales, strict=True)]
            for batch in _batches(parts):
                self._update(batch, **{key: group[key] for key in ("lr", "betas", "weight_decay")})
        return loss

    def _part(self, parameter: nn.Parameter) -> _Part:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return _Part(local_part(parameter), local_part(parameter.grad), local_part(state["exp_avg"]))

    def _update(self, parts: Sequence[_Part], lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        parameters, gradients, momenta, scales = (list(column) for column in zip(*parts, strict=True))
        updates = self._directions(gradients, momenta, betas[0])
        if scales[0] is not None:
            foreach_mul_(updates, self._agreement(updates, gradients))
            foreach_mul_(updates, scales)
        if weight_decay:
            # Decoupled: the decay is of the weight before the update.
            foreach_mul_(parameters, 1 - lr * weight_decay)
        foreach_add_(parameters, updates, alpha=-lr)
        foreach_lerp_(momenta, gradients, 1 - betas[1])

    def _directions(self, gradients: Sequence[Tensor], momenta: Sequence[Tensor], beta: float) -> list[Tensor]:
        """Returns sign(β m + (1 - β) g)."""
        # The sign does not change when both terms are divided by 1 - β, which makes it one pass over memory.
        updates = self._scratch.each("add", gradients, momenta, alpha=beta / (1 - beta))
        foreach_sign_(updates)
        return updates

    def _agreement(self, updates: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Returns 1 where an update and its gradient have the same sign, else 0."""
        # The sign of the product, as comparisons take several times as long.
        agreement = self._scratch.each("mul", updates, gradients)
        foreach_sign_(agreement)
        foreach_clamp_min_(agreement, 0)
        return agreement

    def _scales(self, parameters: Sequence[nn.Parameter], parts: Sequence[_Part], beta: float) -> list[Tensor]:
        """Returns dim(p) / (Σφ + 1) of each parameter, in its dtype."""
        counts = []
        for part in parts:
            dtype = torch.promote_types(part.parameter.dtype, torch.float32)
            # float32 counts no further than 2^24, and a parameter has more elements
            count = torch.zeros((), dtype=torch.float64, device=part.parameter.device)
            for batch in _batches([part]):
                gradients, momenta = [piece.gradient for piece in batch], [piece.momentum for piece in batch]
                agreement = self._agreement(self._directions(gradients, momenta, beta), gradients)
                count += sum(agrees.sum(dtype=dtype) for agrees in agreement)
            counts.append(count)
        _add_over_ranks(parameters, counts)
        pairs = zip(parameters, counts, strict=True)
        return [(parameter.numel() / (count + 1)).to(parameter.dtype) for parameter, count in pairs]


class _Part(NamedTuple):
    """This rank's part of a parameter, or a block of that part."""

    parameter: Tensor
    gradient: Tensor
    momentum: Tensor
    scale: Tensor | None = None
    """() factor on the rate of the elements that move; None: all move, by the rate."""


FOREACH: dict[str, Callable[..., Any]] = {"add": foreach_add, "mul": foreach_mul}


class _Scratch:
    """Memory for tensors that do not outlive a batch.

    On a CPU it is reused from step to step: the system takes longer to supply fresh pages than a pass over them.
    Allocators of other devices cache by themselves.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def each(self, operation: str, first: Sequence[Tensor], second: Sequence[Tensor], **keys: Any) -> list[Tensor]:
        """Returns `torch.<operation>` of each pair, valid until the next call with the same operation."""
        if first[0].device.type != "cpu":
            return list(FOREACH[operation](first, second, **keys))
        results = self._like(operation, first)
        for one, other, result in zip(first, second, results, strict=True):
            getattr(torch, operation)(one, other, out=result, **keys)
        return results

    def _like(self, name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        dtype, sizes = tensors[0].dtype, [tensor.numel() for tensor in tensors]
        if any(tensor.dtype != dtype for tensor in tensors):
            return [torch.empty_like(tensor) for tensor in tensors]
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < sum(sizes):
            buffer = self._buffers[name, dtype] = torch.empty(sum(sizes), dtype=dtype)
        flat = buffer[: sum(sizes)].split(sizes)
        return [memory.view(tensor.shape) for memory, tensor in zip(flat, tensors, strict=True)]


def _add_over_ranks(parameters: Sequence[nn.Parameter], counts: Sequence[Tensor]) -> None:
    """Add each count, in place, over the ranks that its parameter is split over."""
    split: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter, count in zip(parameters, counts, strict=True):
        if isinstance(parameter, DTensor):
            placements = enumerate(parameter.placements)
            groups = tuple(parameter.device_mesh.get_group(i) for i, at in placements if not at.is_replicate())
            split[groups].append(count)
    for groups, own in split.items():
        # Stacked, so that each group of ranks reduces once
        total = torch.stack(own)
        for group in groups:
            dist.all_reduce(total, group=group)
        foreach_copy_(own, list(total.unbind()))


def _batches(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Divide parts into batches that each fit into the cache, or into one kernel."""
    batch: list[_Part] = []
    room = 0
    for part in parts:
        limit = _limit(part.parameter.device)
        for piece in _pieces(part, limit):
            size = piece.parameter.numel()
            if batch and size > room:
                yield batch
                batch = []
            room = (room if batch else limit) - size
            batch.append(piece)
    if batch:
        yield batch


def _limit(device: torch.device) -> int:
    return CPU_BLOCK * torch.get_num_threads() if device.type == "cpu" else KERNEL_ELEMENTS


def _pieces(part: _Part, limit: int) -> Iterator[_Part]:
    """Yields a large part on a CPU as views of `limit` elements if its tensors are contiguous, and others whole."""
    # Without the scale, which is a single number
    tensors = part[:3]
    large = part.parameter.device.type == "cpu" and part.parameter.numel() > limit
    if not (large and all(tensor.is_contiguous() for tensor in tensors)):
        yield part
        return
    for pieces in zip(*(tensor.view(-1).split(limit) for tensor in tensors), strict=True):
        parameter, gradient, momentum = pieces
        yield _Part(parameter, gradient, momentum, part.scale)
