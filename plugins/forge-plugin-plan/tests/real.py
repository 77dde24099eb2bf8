"""A step of a real run, measured: independently of how plans are made."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from forge_core.contracts.contexts import StepContext
from forge_core.data.loader import TrainLoader
from forge_core.engine.build import build_context, build_run
from forge_core.engine.step import Stepper
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_plugin_plan.kernels import FORMULAS


class Collectives(TorchDispatchMode):
    """Counts collectives by (name of the operation, bytes of the largest tensor or list of tensors)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any("DTensor" in str(type_) for type_ in types):
            return NotImplemented
        if func.namespace == "c10d":
            sizes = [sum(t.numel() * t.element_size() for t in tree_leaves(arg) if torch.is_tensor(t)) for arg in args]
            self.seen[func.overloadpacket.__name__, max(sizes)] += 1
        return func(*args, **(kwargs or {}))


class Kept:
    """The most bytes that saved tensors hold at a time: each storage once, no parameters, no logits."""

    def __init__(self, parameters: Any, logits: int) -> None:
        self.parameters = {_local(p).untyped_storage().data_ptr() for p in parameters}
        self.logits, self.now, self.most = logits, 0, 0
        self.holders: Counter[int] = Counter()

    def pack(self, tensor: torch.Tensor) -> Any:
        storage = _local(tensor).untyped_storage()
        holder = Holder(tensor.detach())
        key, size = storage.data_ptr(), storage.nbytes()
        if key not in self.parameters and tensor.shape[-1:] != (self.logits,):
            self.now += size if not self.holders[key] else 0
            self.most = max(self.most, self.now)
            self.holders[key] += 1
            weakref.finalize(holder, self._release, key, size)
        return holder

    def _release(self, key: int, size: int) -> None:
        self.holders[key] -= 1
        self.now -= size if not self.holders[key] else 0


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class StillThere(TorchDispatchMode):
    """Bytes that a forward pass allocates and that are there after it."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any("DTensor" in str(type_) for type_ in types):
            return NotImplemented
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.untyped_storage()._cdata not in known:
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        return result

    def bytes(self) -> int:
        return sum(storage().nbytes() for storage in self.storages.values() if storage() is not None)


def step(job: Job, logits: int = 0) -> dict[str, Any]:
    """Bytes of weights, gradients and optimizer state on this rank, and of what saved tensors hold at most; and the
    collectives of its second step. Collective."""
    context = build_context(job, Catalog.installed(), None)
    run = build_run(job, context)
    loader, stepper = TrainLoader(job, run.datasets, context), Stepper(run)
    parameters = [item.parameter for item in run.parameters]
    found: dict[str, Any] = {}
    for number in range(2):
        batches, kept = loader.next_step(), Kept(parameters, logits)
        with Collectives() as collectives:
            with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda holder: holder.tensor):
                _, sums = stepper.gradients(batches, number)
            norm = stepper.norm()
            found["gradients"] = _bytes(p.grad for p in parameters if p.grad is not None)
            stepper.update(_context(run, norm), sums["loss_sum"])
        found |= {"collectives": collectives.seen, "kept": kept.most}
    loader.close()
    values = [value for state in run.optimizer.state.values() for value in state.values()]
    return found | {"weights": _bytes(parameters), "optimizer": _bytes(v for v in values if torch.is_tensor(v))}


def forward(job: Job) -> int:
    """Bytes that the forward pass of a micro-batch, with its loss, leaves there."""
    context = build_context(job, Catalog.installed(), None)
    run = build_run(job, context)
    loader = TrainLoader(job, run.datasets, context)
    batch = loader.next_step()[0]
    loader.close()
    loss = context.build(job.loss)
    with StillThere() as there:
        output = loss(run.model.head, run.model(batch), batch)
    kept = there.bytes()
    output.sum.backward()
    return kept


def _context(run: Any, norm: torch.Tensor) -> StepContext:
    named = {"job": run.job, "model": run.model, "optimizer": run.optimizer, "tokenizer": None, "folder": None}
    return StepContext(**named, step=1, grad_norm=norm)


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _bytes(tensors: Any) -> int:
    storages = [_local(tensor.detach()).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def peak_and_flops(job: Job) -> tuple[int, float]:
    """The peak bytes of three steps by torch's profiler of allocations, and the FLOPs of one by torch's counter.

    Only tensors that exist before the steps, which are weights and buffers, are counted by their sizes.
    """
    context = build_context(job, Catalog.installed(), None)
    run = build_run(job, context)
    loader, stepper = TrainLoader(job, run.datasets, context), Stepper(run)

    def play(number: int) -> None:
        _, sums = stepper.gradients(loader.next_step(), number)
        stepper.update(_context(run, stepper.norm()), sums["loss_sum"])

    before = _bytes([item.parameter for item in run.parameters]) + _bytes(run.model.buffers())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        for number in range(3):
            play(number)
    # torch before 2.15 counts no attention of the CPU, and 2.15 counts all pairs of positions
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        play(3)
    loader.close()
    now = most = 0
    for event in sorted(_allocations(profiled), key=lambda event: event.start_time_ns):
        now += event.extra_fields.alloc_size
        most = max(most, now)
    return before + most, counter.get_total_flops()


def _allocations(profiled: Any) -> Iterator[Any]:
    """Events of the allocator, whose sizes are negative where memory is freed."""
    waiting = list(profiled.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag.name == "Allocation":
            yield event
