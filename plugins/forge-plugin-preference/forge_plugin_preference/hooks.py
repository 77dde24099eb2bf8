"""Hooks of preference losses: the same reference in a continued run, the known first loss, and the baseline of KTO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define

from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import ForgeError
from forge_plugin_losses.reference_path import ADAPTERS_OFF
from forge_plugin_losses.resumed_models import SameReference

if TYPE_CHECKING:
    from forge_core.contracts.contexts import StepContext, TrainContext
    from forge_plugin_preference.base import PreferenceLoss

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 2e-2}
"""By `train.precision`: how far the first loss may be from the known one, relative to it."""


def reference_hooks(loss: PreferenceLoss, reference: str, check_first_loss: bool) -> Iterator[TrainingHook]:
    """Yields the hooks of a loss with a reference that is a model."""
    if reference == ADAPTERS_OFF:
        yield AdaptersOff()
    elif reference:
        yield SameReference(reference=reference)
    if reference and check_first_loss:
        yield FirstLoss(loss=loss)


@define(kw_only=True, slots=False)
class AdaptersOff(TrainingHook):
    """Computes the log-probabilities of the reference before each step, by the model with its adapters off."""

    resumes_as = "safe"
    played_in_plans: ClassVar[bool] = True
    """See `forge_plugin_plan.lines.PlayedInPlans`: plans count this forward pass."""

    def on_train_begin(self, context: TrainContext) -> None:
        """Checks that the model trains adapters alone. Collective.

        Raises:
            ForgeError: it trains none, or further parameters.
        """
        from forge_plugin_losses.adapters_off import check_adapters

        assert context.build is not None, "the run loop gives hooks its context"
        check_adapters(context.model, context.build.mesh)

    def on_step_begin(self, context: StepContext) -> None:
        """Adds `reference_log_p` to each micro-batch. Collective."""
        from forge_plugin_preference.objective import objective_of

        assert context.build is not None, "the run loop gives hooks its context"
        assert context.executor is not None
        objective_of(context.build.auxiliary).add_reference(context.executor, context.model, context.batches)


@define(kw_only=True, slots=False)
class FirstLoss(TrainingHook):
    """Compares the loss of the first step, in which the model still is the reference, with the known one."""

    resumes_as = "safe"
    loss: Any
    """The `AnswerLoss` of the job."""

    def on_gradients(self, context: StepContext) -> None:
        """Compares before the first update. Collective in the first step.

        Raises:
            ForgeError: the loss is another one.
        """
        from forge_plugin_preference.objective import objective_of

        build = context.build
        assert build is not None, "the run loop gives hooks its context"
        # A run that continues has made this step before; of several runs that train one model, each knows a part of
        # these means
        if context.step != 1 or build.layout.run[1] > 1 or not objective_of(build.auxiliary).starts_as_reference:
            return
        metrics = _means(context)
        known = self.loss.first_loss(metrics)
        if known is None:
            return
        found, name = metrics.get(self.loss.metric), self.loss.metric
        tolerance = TOLERANCE[context.job.train.precision]
        # Not `>`: a loss that is not a number must fail, too
        if found is None or not abs(found - known) <= tolerance * known:
            why = objective_of(build.auxiliary).known_start
            message = (
                f"{name} of the first step is {found}, and must be {known:.6g}, as {why}: "
                "the model that is trained computes something else"
            )
            hint = (
                "look for dropout, noise, other settings of the model, or a plugin that changes it; if it is meant, "
                "set loss.check_first_loss = false"
            )
            raise ForgeError(f"{message}; {hint}")


def _means(context: StepContext) -> dict[str, float]:
    """The means of this step that modules and losses attached, over all ranks. Collective."""
    import torch

    from forge_core.parallel.mesh import all_reduce_tokens, gather_objects, pipeline_group

    build = context.build
    assert build is not None, "the run loop gives hooks its context"
    pipeline = pipeline_group(build.mesh)
    own = {name: float(value) for name, value in build.auxiliary.totals().items() if isinstance(name, str)}
    # Ranks of a pipeline have different modules, and the last one the loss
    every = gather_objects(sorted(own), pipeline) if pipeline is not None else [sorted(own)]
    names = sorted({name for part in every for name in part})
    values = torch.tensor([own.get(name, 0.0) for name in names], dtype=torch.float64, device=build.device)
    if pipeline is not None:
        torch.distributed.all_reduce(values, group=pipeline)
    all_reduce_tokens(values, build.mesh)
    return dict(zip(names, values.tolist(), strict=True))


@define(kw_only=True, slots=False)
class Baseline(TrainingHook):
    """Estimates the reference point z of KTO before each step, on the answers to other prompts of its global batch."""

    resumes_as = "safe"

    def on_step_begin(self, context: StepContext) -> None:
        """Adds `kto_baseline` (B,) to each micro-batch. Collective.

        Raises:
            ForgeError: rows have no answers to other prompts.
        """
        from forge_kit.nn.adapters import evaluating
        from forge_plugin_preference.answers import BASELINE
        from forge_plugin_preference.objective import objective_of

        assert context.build is not None, "the run loop gives hooks its context"
        assert context.executor is not None
        objective = objective_of(context.build.auxiliary)
        with evaluating(context.model):
            z = objective.baseline(context.executor, context.model, context.batches, context.build.mesh)
        for batch in context.batches:
            batch[BASELINE] = z.expand(len(batch["labels"]))
