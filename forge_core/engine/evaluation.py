"""Running the evaluations of a job, and the core's own: the loss on held-out sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import EvaluationComponent
from forge_core.contracts.contexts import EvaluationContext
from forge_core.contracts.data import BYTES_PER_TOKEN, IGNORED_LABEL, Batch, Dataset
from forge_core.contracts.errors import ForgeError
from forge_core.contracts.phase import Phase
from forge_core.engine.hooks import named
from forge_core.parallel.layout import micro_batches

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.model import Model
    from forge_core.engine.build import Run


@frozen(kw_only=True)
class HeldOut(EvaluationComponent):
    """Token-weighted loss and perplexity over held-out sequences; bits per byte where the data has byte counts.

    Logs `{prefix}/loss` in nats per token, `{prefix}/perplexity`, `{prefix}/tokens` and `{prefix}/bits_per_byte`; of a
    loss that is no cross-entropy, `{prefix}/loss` and `{prefix}/tokens`. Does nothing where the data has no held-out
    part.
    """

    sequences: int = field(default=0, validator=ge(0))
    """How many sequences, always the same, evenly spread over all held-out ones; 0: all."""
    prefix: str = "eval"
    """Prefix of the names of the metrics."""

    def evaluate(self, context: EvaluationContext) -> Mapping[str, float]:
        import torch  # not above: a job is checked without torch

        if context.held_out is None:
            return {}
        total = torch.zeros(4, dtype=torch.float64, device=context.build.device)
        batches = iter(context.batches(context.held_out, self.sequences))
        # As many micro-batches at a time as a step has: of one alone, all ranks of a pipeline but one would wait.
        at_a_time, _ = micro_batches(context.job, context.build.layout)
        while group := list(islice(batches, at_a_time)):
            sums, counts = context.executor.evaluate(group).per_sequence
            total[:2] += torch.stack([sums.double().sum(), counts.double().sum()])
            for batch in group:
                if BYTES_PER_TOKEN in batch:
                    labels = (batch["labels"] != IGNORED_LABEL).sum(dim=1)
                    total[2:] += torch.stack([(labels * batch[BYTES_PER_TOKEN]).sum(), labels.sum().double()])
        # Labels are counted separately from `tokens`: ranks that divide sequences each count labels of whole sequences.
        loss_sum, tokens, text_bytes, all_labels = context.all_reduce(total).tolist()
        if not tokens:  # rows without labels have no loss, rather than one of 0
            return {}
        loss = loss_sum / tokens
        perplexity = {"perplexity": math.exp(min(loss, 700.0))} if context.job.loss.is_cross_entropy else {}
        metrics = {"loss": loss, **perplexity, "tokens": tokens}
        if text_bytes and perplexity:
            metrics["bits_per_byte"] = loss / math.log(2) / (text_bytes / all_labels)
        return {f"{self.prefix}/{name}": value for name, value in metrics.items()}


def evaluate(run: Run, step: int) -> dict[str, float]:
    """The metrics of all of `[evaluations]`, by the names under which they are logged. Collective."""
    context, metrics = _context(run, step), dict[str, float]()
    with evaluation_mode(run.model, run.optimizer):
        for name, measure in run.evaluations.items():
            with named(f"evaluations.{name} ({run.context.type_of(run.job.evaluations[name])})"):
                metrics |= _numbers(measure(context))
    return metrics


def _context(run: Run, step: int) -> EvaluationContext:
    from forge_core.data.loader import evaluation_batches
    from forge_core.parallel.mesh import all_reduce_tokens

    def draw(dataset: Dataset, count: int) -> Iterator[Batch]:
        for number, batch in enumerate(evaluation_batches(dataset, count, run.job, run.context), 1):
            run.hooks.beacon.enter(Phase.EVALUATION, detail=f"batch {number}")  # progress, for the watchdog
            yield batch

    return EvaluationContext(
        job=run.job,
        build=run.context,
        step=step,
        model=run.model,
        executor=run.executor,
        held_out=run.held_out,
        batches=draw,
        all_reduce=lambda tensor: all_reduce_tokens(tensor, run.context.mesh),
    )


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics as numbers of Python: loggers and checkpoints take no others. A scalar tensor is waited for."""
    from torch import Tensor

    plain: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            plain[name] = value if isinstance(value, int | float) else float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
            raise ForgeError(f"the metric {name!r} is {kind}; return a number or a scalar tensor") from error
    return plain


@contextmanager
def evaluation_mode(model: Model, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Model and optimizer in evaluation mode, without gradients; each module returns to its own mode afterwards."""
    import torch

    from forge_core.contracts.optimizer import HasEvaluationWeights

    training = [module for module in model.modules() if module.training]
    model.eval()
    swapped = optimizer if isinstance(optimizer, HasEvaluationWeights) else None
    if swapped:
        swapped.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        if swapped:
            swapped.train()
        for module in training:
            module.training = True
