"""The evaluation `preferences`: the loss and its metrics on held-out answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import EvaluationComponent
from forge_core.contracts.errors import Problem
from forge_plugin_preference.answers import LOSSES

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.contexts import EvaluationContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_preference.objective import Objective


@frozen(kw_only=True)
class Preferences(EvaluationComponent):
    """The preference loss on held-out answers, with accuracy, margin and rewards, as means over examples.

    Logs what a training step logs, below the prefix: `eval/loss/dpo`, `eval/rewards/accuracy`, `eval/rewards/margin`.
    It runs the reference, too. Does nothing where the data have no held-out part.
    """

    sequences: int = field(default=0, validator=ge(0))
    """How many rows, always the same, evenly spread over all held-out ones; 0: all."""
    prefix: str = "eval"
    """Prefix of the names of the metrics."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Refuses losses that compare no answers."""
        if not getattr(type(job.loss), "reads_answers", False):
            message = f"evaluates a preference loss, and [loss] is {type(job.loss).__name__}"
            yield Problem("", f"{message}; take type = {LOSSES}, or leave it out")

    def evaluate(self, context: EvaluationContext) -> Mapping[str, float]:
        """Runs the model and the reference over the held-out rows. Collective."""
        from forge_plugin_preference.objective import objective_of

        if context.held_out is None:
            return {}
        objective = objective_of(context.build.auxiliary)
        z = self._baseline(context, objective) if objective.loss.wants_mismatched else None
        means = self._means(context, objective, z)
        # Single answers have no partner to subtract: the means of the two kinds are compared
        if "rewards/margin" not in means:
            means["rewards/margin"] = means["rewards/chosen"] - means["rewards/rejected"]
        return {f"{self.prefix}/{name}": value for name, value in means.items()}

    def _baseline(self, context: EvaluationContext, objective: Objective) -> Tensor:
        """The reference point of KTO, on these rows."""
        batches = list(context.batches(context.held_out, self.sequences))  # type: ignore[arg-type]
        return objective.baseline(context.executor, context.model, batches, context.build.mesh)

    def _means(self, context: EvaluationContext, objective: Objective, z: Tensor | None) -> dict[str, float]:
        import torch

        from forge_core.parallel.layout import micro_batches
        from forge_core.parallel.mesh import gather_objects, pipeline_group
        from forge_plugin_preference.answers import BASELINE

        totals: dict[str, Tensor] = {}

        def measure(head: Any, hidden: Tensor, batch: Batch) -> Any:
            for name, pair in objective.sums(head, hidden, batch).items():
                totals[name] = totals[name] + pair if name in totals else pair
            return objective.training(head, hidden, batch)

        def run(group: list[Batch]) -> None:
            if objective.adapters_off:
                objective.add_reference(context.executor, context.model, group)
            context.executor.evaluate(group, measure)

        # As many micro-batches at a time as a step has: of one alone, all ranks of a pipeline but one would wait
        at_a_time, _ = micro_batches(context.job, context.build.layout)
        group: list[Batch] = []
        for batch in context.batches(context.held_out, self.sequences):  # type: ignore[arg-type]
            group.append(batch if z is None else {**batch, BASELINE: z.expand(len(batch["labels"]))})
            if len(group) == at_a_time:
                run(group)
                group = []
        if group:
            run(group)
        # Of a pipeline, the last rank alone has measured
        pipeline = pipeline_group(context.build.mesh)
        every = gather_objects(sorted(totals), pipeline) if pipeline is not None else [sorted(totals)]
        names = sorted({name for part in every for name in part})
        absent = torch.zeros(2, dtype=torch.float64, device=context.build.device)
        values = torch.stack([totals.get(name, absent) for name in names])
        if pipeline is not None:
            torch.distributed.all_reduce(values, group=pipeline)
        sums, counts = context.all_reduce(values).unbind(1)
        return dict(zip(names, (sums / counts.clamp(min=1)).tolist(), strict=True))
