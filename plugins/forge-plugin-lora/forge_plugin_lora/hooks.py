"""The hooks of the plugin `lora`: fresh adapters leave the model that was loaded as it is, and it was loaded whole."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING

from attrs import define

from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import ForgeError, listed
from forge_plugin_lora.lora import LoRA
from forge_plugin_lora.peft_load import PEFTAdapter

if TYPE_CHECKING:
    from forge_core.contracts.contexts import StepContext, TrainContext
    from forge_core.contracts.data import Batch
    from forge_core.job import Job

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 1e-2}
"""By `train.precision`: how far the two losses may be from each other, relative to the base's.

The adapters add zeros, and DoRA multiplies by 1, so only the order of operations can differ: a bias that is added
later, or another compiled graph."""


@define(kw_only=True, slots=False)
class StartsAsBase(TrainingHook):
    """Compares, before the first step of a new run, the loss with fresh adapters and without them.

    Costs two forward passes of the first micro-batch that has labels, and nothing in later steps.
    """

    resumes_as = "safe"

    def on_step_begin(self, context: StepContext) -> None:
        """Compares before the first step. Collective then.

        Raises:
            ForgeError: the losses differ.
        """
        from forge_kit.nn.adapters import evaluating

        # A run that continues has made this step before, but for one that stopped in it
        if context.step != 1 or not _begin_fresh(context.job):
            return
        # The same number of micro-batches on all ranks, which agree on the first one with labels
        for batch in context.batches:
            with evaluating(context.model):
                without, count = _loss(context, batch, adapters=False)
                with_adapters, _ = _loss(context, batch, adapters=True)
            if count:
                _compare(with_adapters, without, context.job)
                return


@define(kw_only=True, slots=False)
class BaseIsStored(TrainingHook):
    """Checks, before the first step of a process, that all matrices in NF4 were loaded, from a base that stays."""

    resumes_as = "safe"

    def on_train_begin(self, context: TrainContext) -> None:
        """Checks the model.

        Raises:
            ForgeError: a matrix was not loaded, or a checkpoint could not refer to it.
        """
        from forge_core.checkpoint.state import MODEL
        from forge_plugin_lora.nf4_matrix import in_nf4

        referred = (context.model.base or {}).get("tensors", {})
        matrices = dict(in_nf4(context.model))
        empty = [name for name, module in matrices.items() if module.nf4_written != module.nf4_shape.numel()]
        if empty:
            hint = "load it, or name it in plugins.lora.train"
            raise ForgeError(f"[checkpoint.load] has not loaded {listed(empty)}, stored in NF4 and frozen: {hint}")
        if lost := [name for name in matrices if f"{MODEL}{name}.weight" not in referred]:
            reason = "checkpoints have no matrices in NF4: they refer to the first checkpoint of [checkpoint.load]"
            hint = 'load all from one checkpoint, on a disk that ranks share, or take base_dtype = "bf16"'
            raise ForgeError(f"{reason} on a disk, which lacks {listed(lost)}; {hint}")


def _compare(with_adapters: float, without: float, job: Job) -> None:
    # Of a base whose loss is no number, `train.non_finite` decides what happens
    both_nan = math.isnan(with_adapters) and math.isnan(without)
    tolerance = TOLERANCE[job.train.precision] * abs(without)
    # By == first: of two infinite losses the difference is no number
    if both_nan or with_adapters == without or abs(with_adapters - without) <= tolerance:
        return
    table = next(f"plugins.{name}" for name, plugin in job.plugins.items() if isinstance(plugin, LoRA))
    message = (
        f"[{table}]: before the first step the loss is {with_adapters:.6g} with adapters and {without:.6g} without "
        "them. Fresh adapters add nothing, as B is zero: training would not begin with the model that "
        "[checkpoint.load] has loaded"
    )
    hint = "look for a plugin or hook that changes adapters; if it is meant, set"
    raise ForgeError(f"{message}; {hint} {table}.check_first_loss = false")


def _begin_fresh(job: Job) -> bool:
    """Whether the model comes from `[checkpoint.load]`, and no table of it has adapters."""
    from forge_plugin_lora.low_rank import B

    tables = list(job.checkpoint.loads.values())
    if any(isinstance(table, PEFTAdapter) for table in tables):
        return False
    return bool(tables) and not any(name.endswith(f".{B}.weight") for table in tables for name in table.names())


def _loss(context: StepContext, batch: Batch, adapters: bool) -> tuple[float, float]:
    """The mean loss of a micro-batch over all ranks, and the number of its labels. Collective."""
    import torch

    from forge_core.parallel.mesh import all_reduce_tokens
    from forge_kit.nn.adapters import HasAdapter, adapters_off

    assert context.build is not None, "the run loop gives hooks its context"
    assert context.executor is not None
    # A rank of a pipeline may have no layer with an adapter
    has_adapters = any(isinstance(module, HasAdapter) for module in context.model.modules())
    with adapters_off(context.model) if has_adapters and not adapters else nullcontext():
        output = context.executor.evaluate([batch])
    sums = torch.stack([output.loss_sum.double(), output.count.double()])
    total, count = all_reduce_tokens(sums, context.build.mesh).tolist()
    return total / max(count, 1.0), count
