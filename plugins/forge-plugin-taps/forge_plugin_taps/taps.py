"""The component `taps`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import ParallelComponent, TrainingHook
from forge_core.contracts.errors import Problem
from forge_plugin_taps.division import division_problems
from forge_plugin_taps.kinds import GRADIENT, EditComponent, SinkComponent

if TYPE_CHECKING:
    import attrs

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.contracts.runtime import ParallelStage
    from forge_core.job import Job

HOOKS = "its hooks are registered on the modules that the other leaves"
TRACED = "hooks belong into the graph"


def _count_or_all(_: object, attribute: attrs.Attribute, value: int | str) -> None:
    if value != "all" and (not isinstance(value, int) or value < 1):
        raise ValueError(f"{attribute.name!r} must be at least 1 or 'all', got {value!r}")


@frozen(kw_only=True)
class Taps(ParallelComponent):
    """Copies activations at some positions of each sequence, every `interval` steps, and passes them to sinks.

    Training is not changed: the same losses, to the bit.
    """

    after: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("pp", "float8", "tp", "ep", "cp", "activation_checkpointing"), HOOKS
    )
    before: ClassVar[Mapping[str, str]] = {
        "compile": TRACED,
        "fsdp": "parameters are gathered and freed around blocks with all that hangs on them",
    }

    interval: int = field(default=100, validator=ge(1))
    """Steps between sampled ones: step N is sampled if it is divisible by this. A sink may have another."""
    positions: int | Literal["all"] = field(default=16, validator=_count_or_all)
    """Sampled positions of each sequence, other ones in each step; `"all"`: every one."""
    points: tuple[str, ...] = ("layers.*.resid_post",)
    """Globs over names of points whose values are captured."""
    gradients: tuple[str, ...] = ()
    """Globs over names of points whose gradients are captured, under `NAME.grad`. They pass over points that have none,
    such as attention patterns."""
    sinks: Mapping[str, SinkComponent] = field(factory=dict)
    """`[parallel.taps.sinks.NAME]`: what receives the samples; NAME is the default for `type`."""
    edits: Mapping[str, EditComponent] = field(factory=dict)
    """`[parallel.taps.edits.NAME]`: what changes activations; NAME is the default for `type`."""

    def model_problems(self, model: Model, layout: Layout) -> Iterable[Problem]:
        """Checks every glob against the points of the model, and each edit at the points that it matches."""
        from forge_plugin_taps.selection import (
            editable,
            matching,
            sampled_points,
            selection_problems,
            with_gradients,
        )

        declared = sampled_points(model)
        points, gradients = list(declared), with_gradients(declared)
        if not points:
            message = f"{type(model).__name__} has no tap_points(), so nothing in it can be captured"
            yield Problem("", f"{message}; leave the stage out")
            return
        yield from selection_problems("points", self.points, points)
        yield from selection_problems("gradients", self.gradients, gradients)
        for name, edit in self.edits.items():
            for problem in selection_problems("", [edit.point], editable(declared)):
                yield Problem(f"edits.{name}.point", problem.message)
            meant = {point: declared[point] for point in matching([edit.point], editable(declared))}
            yield from (problem.below(f"edits.{name}") for problem in edit.point_problems(meant, layout))
        # Sinks choose among captured points, and not among all points of the model
        captured = matching(self.points, points)
        captured += [name + GRADIENT for name in matching(self.gradients, gradients)]
        for name, sink in self.sinks.items():
            yield from selection_problems(f"sinks.{name}.points", sink.points, captured)
            received = {
                point: declared[point] for point in matching(sink.points or ("*",), captured) if point in declared
            }
            yield from (problem.below(f"sinks.{name}") for problem in sink.point_problems(received))

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that it is known how ranks divide activations, and that each sink receives a step of the job."""
        yield from division_problems(job, layout)
        if job.train.batch_schedule:
            yield Problem("", "counts rows in batches of one size; leave train.batch_schedule out, or this stage")
        if sum(isinstance(stage, Taps) for stage in job.parallel.values()) > 1:
            yield Problem("", "a job has one stage taps at most; give one of them all points, sinks and edits")
        for name, sink in self.sinks.items():
            steps = range(sink.first_step, job.train.steps + 1)
            if not any(sink.is_due(step, self.interval) for step in steps):
                message = f"no step from {sink.first_step} to train.steps {job.train.steps} is divisible by"
                message += f" {sink.interval or self.interval}, so it would receive nothing"
                message += "; choose another interval or first_step"
                key = "first_step" if sink.first_step > job.train.steps else "interval" if sink.interval else ""
                path = f"sinks.{name}.{key}" if key else "interval"
                yield Problem(path, message, fits=job.train.steps)  # a step that is divisible by it
        for name, edit in self.edits.items():
            # Passes of evaluations with edits run eagerly; training would have to, too, in every step.
            if edit.in_training and "compile" in job.parallel:
                message = "compiled blocks pass over edits, and this one is on in training"
                yield Problem(f"edits.{name}.in_training", f"{message}; leave it out, or [parallel.compile]")

    def training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """Yields the hook that records steps; without sinks it records none."""
        from forge_plugin_taps.hook import TapsHook

        yield TapsHook(component=self)

    def build(self, context: BuildContext) -> ParallelStage:
        """Imports torch only here: a job is checked without it."""
        from forge_plugin_taps.stage import TapsStage

        return TapsStage(self, context)
