"""The model in training as its own reference, by a forward pass with its adapters off before each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.contracts.errors import ForgeError
from forge_core.losses import loss_output
from forge_core.parallel.mesh import gather_objects, pipeline_group
from forge_kit.nn.adapters import HasAdapter, adapter_names, adapters_off, evaluating
from forge_plugin_preference.answers import REFERENCE

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Head, Model
    from forge_core.contracts.runtime import Executor, LossOutput
    from forge_plugin_preference.objective import Objective


def add_reference(objective: Objective, executor: Executor, model: Model, batches: Sequence[Batch]) -> None:
    """Add to each micro-batch the log-probabilities of its answers under the model with adapters off. Collective.

    They take the place of log-probabilities in the data, in the entry `forge_plugin_preference.answers.REFERENCE`.
    """
    # Not inside of the loss: a second forward pass between forward and backward needs the whole pipeline, and the
    # stages of a rank have one micro-batch open at a time.
    sums: list[Tensor] = []

    def measure(head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        log_p = objective.log_p(head, hidden, batch)
        sums.append(objective.answer_sums(log_p, batch))
        return loss_output(log_p.sum(), log_p, batch["labels"] != IGNORED_LABEL)

    with without_adapters(model):
        executor.evaluate(batches, measure)
    # Of a pipeline, the last rank alone computes losses: the others have no sums, and need none
    for batch, values in zip(batches, sums, strict=False):
        batch[REFERENCE] = values[:, None]  # type: ignore[index]


def token_log_probabilities(
    objective: Objective, executor: Executor, model: Model, batches: Sequence[Batch]
) -> list[Tensor]:
    """Compute log p of each label (B, S) of this rank's part of the batches, in order, with adapters off. Collective.

    Of a pipeline, the ranks before the last return an empty list.
    """
    every: list[Tensor] = []

    def measure(head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        every.append(objective.log_p(head, hidden, batch))
        return loss_output(every[-1].sum(), every[-1], batch["labels"] != IGNORED_LABEL)

    with without_adapters(model):
        executor.evaluate(batches, measure)
    return every


@contextmanager
def without_adapters(model: Model) -> Iterator[None]:
    """A context in which a model computes what it did before its adapters were trained, without dropout."""
    # A rank of a pipeline may have only layers without adapters; `check_adapters` has seen that others have some
    off = adapters_off(model) if _has_adapters(model) else nullcontext()
    with evaluating(model), off:
        yield


def check_adapters(model: Model, mesh: DeviceMesh | None) -> None:
    """Check that the model has adapters, and trains nothing else. Collective.

    Raises:
        ForgeError: with its adapters off it would not be the model from which training began.
    """
    adapters = {*adapter_names(model)}
    others = [name for name, parameter in model.named_parameters() if parameter.requires_grad and name not in adapters]
    own = (_has_adapters(model), others[:1])
    pipeline = pipeline_group(mesh)
    every = gather_objects(own, pipeline) if pipeline is not None else [own]
    if not any(there for there, _ in every):
        raise ForgeError('loss.reference = "adapters_off": the model has no adapters; give a checkpoint')
    if trained := [name for _, names in every for name in names]:
        message = f"{trained[0]} trains, too, so that the model with adapters off changes in training"
        raise ForgeError(f'loss.reference = "adapters_off": {message}; freeze it, or give a checkpoint')


def _has_adapters(model: Model) -> bool:
    return any(isinstance(module, HasAdapter) for module in model.modules())
