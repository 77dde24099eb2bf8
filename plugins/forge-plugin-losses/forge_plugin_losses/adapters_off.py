"""The model in training as its own reference, by a forward pass with its adapters off before each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.contracts.errors import ForgeError
from forge_core.losses import loss_output
from forge_core.parallel.mesh import gather_objects, pipeline_group
from forge_kit.nn.adapters import HasAdapter, adapter_names, adapters_off, evaluating

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Head, Model
    from forge_core.contracts.runtime import Executor, LossOutput


def without_adapters(
    executor: Executor, model: Model, batches: Sequence[Batch], measure: Callable[[Head, Tensor, Batch], Tensor]
) -> list[Tensor]:
    """Compute something of each micro-batch with the model's adapters off, in a forward pass. Collective.

    Args:
        executor: of the run.
        model: in training.
        batches: this rank's micro-batches.
        measure: from head, hidden states and this rank's positions of a micro-batch, such as log-probabilities.

    Returns:
        What it returned, in the order of the batches. Of a pipeline, the ranks before the last have nothing.
    """
    # Not inside of the loss: a second forward pass between forward and backward needs the whole pipeline, and the
    # stages of a rank have one micro-batch open at a time.
    every: list[Tensor] = []

    def loss(head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        every.append(measure(head, hidden, batch))
        losses = hidden.new_zeros(batch["labels"].shape)
        return loss_output(losses.sum(), losses, batch["labels"] != IGNORED_LABEL)

    with adapters_off_for_evaluation(model):
        executor.evaluate(batches, loss)
    return every


@contextmanager
def adapters_off_for_evaluation(model: Model) -> Iterator[None]:
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
