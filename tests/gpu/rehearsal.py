"""A training step on the meta device: a check of code for GPUs that needs none.

Tensors of the meta device have shapes and no content. As with CUDA, they cannot be mixed with those of the host, code
for "any device but the CPU" runs, and whatever reads a number on the host raises: a GPU would be waited for there. What
the device's name alone decides (kernels of attention, products of experts) is chosen as for CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import attrs
import torch
from torch import Tensor

from forge_core import Catalog, Job
from forge_core.auxiliary import Auxiliary
from forge_core.contracts.model import Initialises
from forge_core.engine.build import BuiltModel, Run, assemble, build_bare_model, build_context, stages_of
from forge_core.engine.hooks import HookRunner
from forge_core.engine.reporting import Tracker
from forge_core.engine.step import Stepper, metrics
from forge_core.parallel.initialise import allocate
from forge_core.parallel.stages import apply_stages

META = torch.device("meta")


@contextmanager
def _fused_on_meta() -> Iterator[None]:
    """torch's optimizers know no fused kernel for the meta device, though the operations have shapes there."""
    supported = "torch.utils._foreach_utils._get_fused_kernels_supported_devices"
    with (
        patch(supported, lambda: ["cpu", "cuda", "meta"]),
        patch("torch.optim.adam._device_dtype_check_for_fused", lambda *_, **__: None),
    ):
        yield


def rehearse(job: Job, extra: dict[str, Tensor] | None = None, steps: int = 2) -> Run:
    """Build a job on the meta device, and make steps with their updates and metrics.

    Args:
        job: for the CPU, of one process.
        extra: further entries of each batch.

    Raises:
        RuntimeError: something reads a number on the host, or mixes devices.
    """
    with _fused_on_meta():
        run = _build(job)
        stepper = Stepper(run)
        for step in range(steps):
            _, sums = stepper.gradients([_batch(run, extra or {})], step)
            decided: Any = SimpleNamespace(grad_norm=stepper.norm(), requests=SimpleNamespace(skip=""))
            skipped = stepper.update(decided, sums["loss_sum"])
            _log(
                {
                    **metrics(sums),
                    **run.context.auxiliary.summaries(),
                    "grad_norm": decided.grad_norm,
                    "skipped": skipped,
                }
            )
    return run


def _build(job: Job) -> Run:
    catalog = Catalog.installed()
    job = attrs.evolve(job, train=attrs.evolve(job.train, device="cpu"))
    context = attrs.evolve(build_context(job, catalog, None), device=META, auxiliary=Auxiliary(META))
    choosing = attrs.evolve(context, device=torch.device("cuda"))
    model, outline = build_bare_model(job, choosing)
    stages = stages_of(job, context)
    model, built = apply_stages(model, stages, context)
    allocate(model, META)
    for module in model.modules():  # type: ignore[attr-defined]
        if isinstance(module, Initialises):
            module.init_buffers(META)
    loss = choosing.build(job.loss)
    return assemble(job, context, BuiltModel(model, outline, stages, built), loss, (), HookRunner({}))


def _batch(run: Run, extra: dict[str, Tensor]) -> dict[str, Tensor]:
    shape = run.job.train.micro_batch_size, run.job.train.seq_len
    batch = {name: torch.zeros(shape, dtype=torch.long, device=META) for name in ("input_ids", "labels")}
    return batch | {name: tensor.to(META) for name, tensor in extra.items()}


def _log(scalars: dict[Any, Tensor | None]) -> None:
    """As far as the copy to the host, which a device without content cannot make."""
    arrived: list[Any] = []
    tracker = Tracker(arrived.append)
    with patch("forge_core.engine.reporting._Pending.ready", lambda self: False):
        tracker.put({}, {name: value for name, value in scalars.items() if value is not None})
