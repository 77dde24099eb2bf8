"""The evaluation `ablate`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import EvaluationComponent
from forge_core.contracts.errors import Problem, did_you_mean
from forge_core.parallel.layout import micro_batches
from forge_plugin_taps.taps import Taps

if TYPE_CHECKING:
    from forge_core.contracts.contexts import EvaluationContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


@frozen(kw_only=True)
class Ablate(EvaluationComponent):
    """Held-out loss without edits and with each of `[parallel.taps.edits]`, one at a time, under any layout.

    Logs `{prefix}/loss`, in nats a token, and for each edit `{prefix}/NAME/loss` and `{prefix}/NAME/change`.
    """

    edits: tuple[str, ...] = ()
    """Names of edits; by default all of the job."""
    sequences: int = field(default=0, validator=ge(0))
    """How many held-out sequences, always the same; 0: all."""
    prefix: str = "ablate"
    """Prefix of the names of the metrics."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that the job has edits, and those that `edits` names."""
        there = [name for taps in _stages(job) for name in taps.edits]
        if not there:
            yield Problem("", "there is nothing to ablate; add [parallel.taps.edits.NAME], or leave the evaluation out")
            return
        for number, name in enumerate(self.edits):
            if name not in there:
                hint = did_you_mean(name, there) or f"; there are {', '.join(there)}"
                yield Problem(f"edits.{number}", f"[parallel.taps.edits] has no {name!r}{hint}")

    def evaluate(self, context: EvaluationContext) -> Mapping[str, float]:
        """Returns the losses with each edit on by itself; none without held-out data. Collective."""
        from forge_plugin_taps.recorder import recorder_of

        if context.held_out is None:
            return {}
        recorder = recorder_of(context.model)
        # Without any: edits may be on in training, and in a command all of the job are
        with recorder.editing(()):
            plain = self._loss(context)
        metrics = {f"{self.prefix}/loss": plain}
        for name in self.edits or recorder.component.edits:
            with recorder.editing([name]):
                loss = self._loss(context)
            metrics |= {f"{self.prefix}/{name}/loss": loss, f"{self.prefix}/{name}/change": loss - plain}
        return metrics

    def _loss(self, context: EvaluationContext) -> float:
        import torch

        # float64: the change by an edit may be far smaller than the sum of losses
        total = torch.zeros(2, dtype=torch.float64, device=context.build.device)
        batches = iter(context.batches(context.held_out, self.sequences))  # type: ignore[arg-type]
        at_a_time, _ = micro_batches(context.job, context.build.layout)
        # As many as a step has: a pipeline has that many micro-batches in flight
        while group := list(islice(batches, at_a_time)):
            sums, counts = context.executor.evaluate(group).per_sequence
            total += torch.stack([sums.double().sum(), counts.double().sum()])
        # Sums and not means over ranks, whose sequences may have different numbers of targets
        loss_sum, tokens = context.all_reduce(total).tolist()
        return float(loss_sum / max(tokens, 1))


def _stages(job: Job) -> list[Taps]:
    return [stage for stage in job.parallel.values() if isinstance(stage, Taps)]
