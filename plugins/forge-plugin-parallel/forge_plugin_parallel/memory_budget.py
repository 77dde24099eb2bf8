"""Estimates a rank's memory with each mode of activation checkpointing, and chooses the mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from forge_core.auxiliary import Auxiliary
from forge_core.contracts.errors import JobError, Problem
from forge_core.parallel.layout import micro_batches
from forge_core.parallel.mesh import local_part, pipeline_group
from forge_kit.nn.batches import zero_batch
from forge_kit.nn.blocks import blocks_of, further_blocks
from forge_kit.nn.recomputing import Recomputing
from forge_plugin_parallel.fsdp import FSDP
from forge_plugin_parallel.memory import (
    Bytes,
    device_memory,
    gradient_bytes,
    optimizer_bytes,
    parameter_bytes,
    peak_bytes,
    saved_bytes,
    stand_ins,
)
from forge_plugin_parallel.recomputation import Checkpointed, Contexts

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Carry, Model
    from forge_plugin_parallel.activation_checkpointing import ActivationCheckpointing

FIRST, LAST = 0, 1
"""Indices of a model's ends, as `Model.ends` returns them."""
NONE = "none"
MODES = (NONE, "selective", "full")
"""From the least computation to the least memory."""
USABLE = 0.9
"""Usable share of free device memory: fragmentation, temporary tensors and communication buffers need the rest."""


@frozen(kw_only=True)
class Budget:
    """Bytes that a rank needs (largest of all ranks), and bytes available to it (smallest of all ranks)."""

    available: Bytes
    state: Mapping[str, Bytes]
    """Needed with every mode: weights, gradients, …"""
    activations: Mapping[str, Bytes]
    """Peak by mode: with the loss, or with one block being recomputed."""

    @classmethod
    def of(cls, model: Model, component: ActivationCheckpointing, context: BuildContext) -> Budget:
        """Estimate for a model on the meta device. Collective.

        Args:
            model: this rank's part of the model, after the stages that split it.
            component: the settings of activation checkpointing.
            context: of the build.

        Raises:
            JobError: model, loss or optimizer cannot run on shapes alone.
        """
        limit = component.memory_gb
        available = int(limit * 1e9) if limit else int(USABLE * device_memory(context.device))
        try:
            state = _state(model, context)
            activations = _activations(model, component.every, context)
        # Of any kind, as the model, the loss and the optimizer may be code of any plugin
        except Exception as error:
            message = f"auto cannot estimate what this job takes: {type(error).__name__}: {error}"
            hint = 'take "selective" or "full"'
            raise JobError([Problem("parallel.activation_checkpointing.mode", f"{message}; {hint}")]) from error
        # All ranks must choose one mode. One maximum serves: the smallest available is the negative of a largest.
        available, *largest = _agreed([-available, *state.values(), *activations.values()])
        numbers = iter(largest)
        return cls(
            available=-available,
            state={name: next(numbers) for name in state},
            activations={name: next(numbers) for name in activations},
        )

    @property
    def mode(self) -> str:
        """The first mode that fits, else the last."""
        return next((mode for mode in MODES if self.total(mode) <= self.available), MODES[-1])

    def total(self, mode: str) -> Bytes:
        """Returns the bytes that a rank needs with this mode."""
        return sum(self.state.values()) + self.activations[mode]

    def __str__(self) -> str:
        takes = ", ".join(f"{_readable(self.total(mode))} with {mode}" for mode in MODES)
        parts = ", ".join(f"{name} {_readable(size)}" for name, size in self.state.items())
        short = "" if self.total(self.mode) <= self.available else "; even that may be too much"
        return f"{self.mode}, as a rank takes {takes}, of {_readable(self.available)} ({parts}){short}"


def _readable(size: Bytes) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def _agreed(numbers: list[int]) -> list[int]:
    """Element-wise maximum over all ranks."""
    largest = torch.tensor(numbers, dtype=torch.int64)
    if dist.is_initialized():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()


# --- memory that does not depend on the mode ---------------------------------------------------------------------


def _state(model: Model, context: BuildContext) -> dict[str, Bytes]:
    sizes = {"weights": parameter_bytes(model), "gradients": gradient_bytes(model)}
    sizes["optimizer"] = optimizer_bytes(model, context)
    shards = _shards(context)
    if shards == 1:
        return sizes
    # Another stage may shard, and counts as this one with its defaults
    fsdp = next((stage for stage in context.job.parallel.values() if isinstance(stage, FSDP)), FSDP())
    adds_up = micro_batches(context.job, context.layout)[0] > 1 and not fsdp.reduce_every_micro_batch
    # With offload they are in the host's memory, and the budget is for the device's
    elsewhere = fsdp.offload and context.device.type != "cpu"
    split = {name: 0 if elsewhere else size // shards for name, size in sizes.items()}
    whole = {"gathered": _gathered(model, fsdp.reshards(context.layout), context.dtype)}
    return split | ({"gradients": sizes["gradients"]} if adds_up else {}) | whole


def _shards(context: BuildContext) -> int:
    """Number of ranks over which fsdp will shard each parameter."""
    sharded = any("shard" in stage.degrees() for stage in context.job.parallel.values())
    return context.layout.token_ranks // context.layout.replicate if sharded else 1


def _gathered(model: Model, reshards: bool, dtype: torch.dtype) -> Bytes:
    """Bytes of parameters gathered at one time, in the compute dtype.

    These are the parameters outside all blocks, and the two largest blocks (one computed, one prefetched).
    """
    blocks = sorted(sum(local_part(p).numel() for p in block.parameters()) for block in blocks_of(model))
    everything = sum(local_part(parameter).numel() for parameter in model.parameters())
    whole = everything - sum(blocks) + sum(blocks[-2:]) if reshards else everything
    return whole * dtype.itemsize


# --- activations -------------------------------------------------------------------------------------------------


def _activations(model: Model, every: int, context: BuildContext) -> dict[str, Bytes]:
    """Peak activation bytes by mode; in a pipeline, of this rank's layers.

    Saved tensors for the backward passes of all micro-batches in flight, plus the loss or a recomputed block.
    """
    job = context.job
    count, _ = micro_batches(job, context.layout)
    alive = max([stage.micro_batches_alive(count) for stage in job.parallel.values()], default=1.0)
    loss = context.build(job.loss)
    shapes = _carry(model, context)
    with stand_ins(model, context.device, _compute_dtype(context)), rehearsing(context.auxiliary):
        batch = _batch(model, context)
        # As in a step: what needs a gradient decides what is saved
        carry = tuple(torch.empty(s, dtype=d, device=context.device).requires_grad_() for s, d in shapes)
        blocks = _saved_by_blocks(model, carry, batch, context)
        of_carry = sum(_size(tensor) for tensor in carry)
        of_start, of_end, of_loss = _End(dict.fromkeys(MODES, of_carry)), _End(dict.fromkeys(MODES, 0)), 0
        if _has_end(model, FIRST, context):
            of_start = _End.of(model, lambda: model.embed(batch), every, context)
        if _has_end(model, LAST, context):
            of_end = _End.of(model, lambda: model.finish(carry, batch), every, context)
            # Detached, so that the peak is the loss's alone
            hidden = model.finish(carry, batch).detach().requires_grad_()

            def run_loss() -> None:
                loss(model.head, hidden, batch).sum.backward()

            of_loss = peak_bytes(run_loss)
    largest = max(of_start.block, of_end.block, *(block[NONE] for block in blocks))
    peaks = {}
    for mode in MODES:
        saved = sum(block[NONE if number % every else mode] for number, block in enumerate(blocks))
        # The embedding of some models saves nothing, but what it returns is kept as the input of the first layer.
        saved += max(of_start.saved[mode], of_carry) + of_end.saved[mode]
        # The larger of both, not their sum: the loss is done before the first block is recomputed.
        peaks[mode] = int(alive * saved) + max(of_loss, largest if mode != NONE else 0)
    return peaks


@contextmanager
def rehearsing(auxiliary: Auxiliary) -> Iterator[None]:
    """Marks a forward pass on shapes alone: modules do what they do in a training step, and nothing counts."""
    was_active, auxiliary.active = auxiliary.active, True
    try:
        with Recomputing(auxiliary):
            yield
    finally:
        auxiliary.active = was_active


def _carry(model: Model, context: BuildContext) -> list[tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of activations between layers. In a pipeline, the first rank broadcasts them (collective)."""
    shapes: list[Any] = [None]
    if _has_end(model, FIRST, context):
        with stand_ins(model, context.device, _compute_dtype(context)):
            shapes = [[(tensor.shape, tensor.dtype) for tensor in model.embed(_batch(model, context))]]
    pipeline = pipeline_group(context.mesh)
    if pipeline is not None:
        dist.broadcast_object_list(shapes, group_src=0, group=pipeline)
    return shapes[0]  # type: ignore[no-any-return]


def _has_end(model: Model, end: int, context: BuildContext) -> bool:
    """Whether this rank holds an end of the model; without a pipeline every rank does."""
    if context.layout.pp == 1:
        return True
    ends = model.ends()
    assert ends is not None
    return all(next(model.get_submodule(name).parameters(), None) is not None for name in ends[end])


def _compute_dtype(context: BuildContext) -> torch.dtype | None:
    """Dtype of parameters while they are gathered; None where nothing gathers them."""
    return context.dtype if _shards(context) > 1 else None


def _batch(model: Model, context: BuildContext) -> Batch:
    """A prepared micro-batch whose sequences are one document each."""
    job, layout = context.job, context.layout
    batch = zero_batch(job, micro_batches(job, layout)[1], context.device)
    if layout.cp > 1:
        own, divided = job.train.seq_len // layout.cp, {"input_ids", "labels", *(model.sequence_entries() or ())}
        batch |= {name: tensor[:, :own] for name, tensor in batch.items() if name in divided}
        # Shapes count here, not values
        batch["positions"] = batch["input_ids"]
        batch["places"] = torch.arange(own, device=context.device).expand_as(batch["input_ids"])
    return model.prepare(batch)


def _saved_by_blocks(model: Model, carry: Carry, batch: Batch, context: BuildContext) -> list[dict[str, Bytes]]:
    """Saved bytes of each block, by mode. Equal blocks are computed once."""
    known: dict[str, dict[str, Bytes]] = {}
    sizes = []
    for block in model.layers.values():
        # Printed modules and shapes stand for a block's structure: measuring each of many equal layers takes long
        structure = f"{block} {[(key, tuple(parameter.shape)) for key, parameter in block.named_parameters()]}"
        if structure not in known:
            known[structure] = {mode: _saved(block, mode, carry, batch, context) for mode in MODES}
        sizes.append(known[structure])
    return sizes


def _saved(block: nn.Module, mode: str, carry: Carry, batch: Batch, context: BuildContext) -> Bytes:
    if mode == NONE:
        return saved_bytes(lambda: block.forward(carry, batch))
    forward = Checkpointed.of(block, Contexts.of(mode, context))
    return saved_bytes(lambda: forward(carry, batch))


@frozen
class _End:
    """Bytes of an end of the model, with the further blocks that it runs, which are checkpointed like layers."""

    saved: Mapping[str, Bytes]
    """Saved for the backward pass, by mode."""
    block: Bytes = 0
    """Saved by the largest of its further blocks, if it is not checkpointed."""

    @classmethod
    def of(cls, model: Model, run: Callable[[], Any], every: int, context: BuildContext) -> _End:
        """Measure `run`, a call of `embed` or `finish`."""
        blocks = further_blocks(model)
        # The blocks that the stage recomputes: it counts those of layers, too
        chosen = [block for block in blocks_of(model)[::every] if block in blocks]
        sizes = [0]
        with _forwards_replaced(blocks, partial(_measured, sizes=sizes)):
            saved = {NONE: saved_bytes(run)}
        for mode in MODES[1:]:
            with _forwards_replaced(chosen, partial(Checkpointed.of, contexts=Contexts.of(mode, context))):
                saved[mode] = saved_bytes(run)
        return cls(saved, max(sizes))


def _measured(block: nn.Module, sizes: list[Bytes]) -> Callable[..., Any]:
    """Returns the block's forward pass, which from now on adds the bytes that it saves to `sizes`."""
    forward = block.forward

    def measure(*args: Any, **kwargs: Any) -> Any:
        results: list[Any] = []
        sizes.append(saved_bytes(lambda: results.append(forward(*args, **kwargs))))
        return results[0]

    return measure


@contextmanager
def _forwards_replaced(blocks: Sequence[nn.Module], replace: Callable[[Any], Any]) -> Iterator[None]:
    originals = [block.forward for block in blocks]
    try:
        for block in blocks:
            block.forward = replace(block)
        yield
    finally:
        for block, forward in zip(blocks, originals, strict=True):
            block.forward = forward


def _size(tensor: Tensor) -> Bytes:
    return tensor.numel() * tensor.element_size()
