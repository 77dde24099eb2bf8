"""The plugin `freeze`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from attrs import define, field, frozen
from attrs.validators import ge, min_len, optional

from forge_core import Job, JobError, ModelComponent, Plugin, Problem, TrainingHook, hookimpl, when_resumed
from forge_core.contracts.errors import LEFT_OUT

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_plugin_freeze.selection import TrainedStages


@frozen(kw_only=True)
class Stage:
    """`[[plugins.freeze.stages]]`: what trains for some steps.

    Patterns have shell syntax and match parameter names (`layers.*`); `*` stands for any characters, dots included. A
    parameter trains if its name matches a pattern of `train` and no pattern of `freeze`.
    """

    train: tuple[str, ...] = field(default=("*",), validator=min_len(1))
    """Patterns of the names that train."""
    freeze: tuple[str, ...] = ()
    """Patterns of the names that do not; they win over `train`."""
    steps: int | None = field(default=None, validator=optional(ge(1)))
    """Steps that the stage lasts. Left out in the last stage, which lasts to the end of the run."""


@define(kw_only=True, slots=False)
class Freeze(Plugin):
    """Trains a part of the model at a time, in stages that follow one another in one run.

    A frozen parameter does not change by a bit: it has no gradient, no share in the gradient norm, no weight decay, and
    no optimizer state before it trains. What trains depends on the step alone, so there is no state in checkpoints.
    """

    stages: tuple[Stage, ...] = field(validator=min_len(1))
    """The stages, in order."""
    patience: int = field(default=100, validator=ge(0), metadata=when_resumed("safe"))
    """Steps of a stage after which the run ends if nothing that one of its patterns names has changed yet, for example
    because its gradient was zero in all of them; 0: no limit."""

    def __attrs_post_init__(self) -> None:
        self._selection: TrainedStages | None = None  # no field, which would be state of the run

    @property
    def selection(self) -> TrainedStages:
        """Parameters of the model by stage; known once the model is built."""
        assert self._selection is not None, "the model must be built before the selection of its parameters is read"
        return self._selection

    # --- steps -----------------------------------------------------------------------------------------------------

    def stage_of(self, step: int) -> int:
        """Returns the number of the stage of update `step`, which counts from 1."""
        return bisect_left(self._ends, step)

    def steps_of(self, number: int, total: int) -> tuple[int, int]:
        """Returns the first and the last step of a stage in a run of `total` steps."""
        ends = [0, *self._ends, total]
        return ends[number] + 1, ends[number + 1]

    @property
    def _ends(self) -> Sequence[int]:
        """Last steps of all stages but the last one."""
        return list(accumulate(stage.steps or 0 for stage in self.stages[:-1]))

    # --- the job ---------------------------------------------------------------------------------------------------

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks the lengths of the stages: only the last may have none, and all must fit into `train.steps`."""
        *earlier, last = self.stages
        for number, stage in enumerate(earlier):
            if stage.steps is None:
                yield Problem(f"stages.{number}.steps", "is missing; only the last stage may leave it out")
                return
        total, begun = job.train.steps, sum(stage.steps or 0 for stage in earlier)
        for number in range(1, len(self.stages)):
            before = self._ends[number - 1]
            if before >= total:
                message = f"the stage would begin after {before:,} steps and never act: train.steps is {total:,}"
                yield Problem(f"stages.{number}", message, fits=LEFT_OUT)
        if begun < total and last.steps is not None and begun + last.steps != total:
            message = f"the last stage would end after {begun + last.steps:,} steps, but train.steps is {total:,}"
            message += "; leave it out, and the stage lasts to the end"
            yield Problem(f"stages.{len(earlier)}.steps", message, fits=total - begun)

    def waits(self) -> str:
        """Those of `Audit`."""
        return "three at each stage that begins, for what has changed"

    # Outside of the wrappers of other plugins: adapters that they add have names too.
    @hookimpl(wrapper=True, tryfirst=True)
    def forge_build_model(self, component: ModelComponent, context: BuildContext) -> Generator[None, Model, Model]:
        """Selects the parameters of the whole model, and freezes it as in the stage that trains most."""
        model = yield
        if component is context.job.model:  # and not a model inside of it
            self._select(model)
        return model

    def _select(self, model: Model) -> None:
        from forge_plugin_freeze.selection import TrainedStages, problems_of
        from forge_plugin_freeze.switch import let_heads_train_alone

        if problems := list(problems_of(model, self.stages)):
            raise JobError(problem.below("plugins.freeze") for problem in problems)
        self._selection = TrainedStages.of(model, self.stages)
        # Applies until the first step, which sets its own stage: memory estimates and the dry run use the stage that
        # trains most.
        self._selection.apply(model, self._selection.largest)
        let_heads_train_alone(model)

    def training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """One hook, which switches between the stages and checks that they change what they train."""
        from forge_plugin_freeze.hook import StagedFreezing

        return [StagedFreezing(freeze=self)]

    # --- reports ---------------------------------------------------------------------------------------------------

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        """Reports what each stage trains, in the summary of the run."""
        for number, stage in enumerate(self.stages):
            first, last = self.steps_of(number, context.job.train.steps)
            counts = self.selection.describe(number)
            yield f"freeze {number}", f"steps {first:,} to {last:,} train {counts}", _patterns(stage)

    def plan_lines(self, job: Job) -> Iterable[tuple[str, str]]:
        """Reports what each stage trains to `forge-run plan`, whose estimates apply to the stage that trains most.

        See `forge_plugin_plan.lines.HasPlanLines`.
        """
        for number in range(len(self.stages)):
            first, last = self.steps_of(number, job.train.steps)
            estimated = "; all estimates are of this stage" if number == self.selection.largest else ""
            yield f"freeze {number}", f"steps {first:,} to {last:,} train {self.selection.describe(number)}{estimated}"


def _patterns(stage: Stage) -> str:
    left_out = f" but {', '.join(stage.freeze)}" if stage.freeze else ""
    return f"{', '.join(stage.train)}{left_out}"
