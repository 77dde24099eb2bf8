"""The part of the stage that takes part in the run loop: records steps, and passes samples to sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field

from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import ForgeError

if TYPE_CHECKING:
    from forge_core.contracts.contexts import StepContext, TrainContext
    from forge_plugin_taps.kinds import Sink
    from forge_plugin_taps.recorder import Recorder
    from forge_plugin_taps.taps import Taps


@define(kw_only=True, slots=False)
class TapsHook(TrainingHook):
    """Records the steps that some sink receives, and passes their samples on."""

    component: Taps = field(repr=False)

    def __attrs_post_init__(self) -> None:
        # Not fields, which would be state: sinks have their own, and nothing of a recorder is saved.
        self._sinks: dict[str, tuple[Sink, list[str]]] = {}
        self._due: list[str] = []
        self._recorder: Recorder | None = None
        self._restored: Mapping[str, Any] = {}
        self._unsettled = False

    def on_train_begin(self, context: TrainContext) -> None:
        """Builds the sinks, gives them their restored state, and starts them. Collective."""
        from forge_plugin_taps.recorder import recorder_of

        if context.build is None:
            raise ForgeError("the hook of [parallel.taps] needs the run loop's contexts, with `build`")
        self._recorder = recorder_of(context.model)
        info = self._recorder.agree()
        edits = self.component.edits.items()
        # Edits are on for commands by default; in training only those that are meant for it
        self._recorder.current.edits = frozenset(name for name, edit in edits if edit.in_training)
        for name, component in self.component.sinks.items():
            names = component.received(info)
            points = {point: info.points[point] for point in names}
            own = evolve(info, points=points, interval=component.interval or info.interval)
            self._sinks[name] = context.build.build(component, taps=own), names
            self._recorder.sinks[name] = self._sinks[name][0]
        # Before `start`, by which a sink removes what it keeps of later steps
        self._give_state(self._restored)
        for sink, _ in self._sinks.values():
            sink.start(context.step)

    def on_step_begin(self, context: StepContext) -> None:
        """Starts to record if a sink is due: a function of the step, the same on every rank."""
        interval, sinks = self.component.interval, self.component.sinks
        self._due = [name for name, sink in sinks.items() if sink.is_due(context.step, interval)]
        if self._due and self._recorder is not None:
            self._recorder.begin(context.step)

    def on_step_end(self, context: StepContext) -> None:
        """Finishes the sinks' work of the last sampled step, then passes them this step's samples. Collective."""
        self._settle()
        if not self._due or self._recorder is None:
            return
        sample = self._recorder.end()
        for sink, names in (self._sinks[name] for name in self._due):
            sink.consume(sample.of(names))
            for name, value in sink.metrics().items():
                context.log(name, value)
        # Settled a step later, when the copies to the host have arrived while the next step ran
        self._unsettled = True

    def on_rollback(self, context: TrainContext, step: int, reason: str) -> None:
        """Starts the sinks again, whose state was restored before; what they have begun and not finished is lost."""
        for sink, _ in self._sinks.values():
            sink.start(context.step)

    def on_train_end(self, context: TrainContext) -> None:
        """Closes the sinks; `final` after the last step of the job."""
        self._settle()
        for sink, _ in self._sinks.values():
            sink.close(final=context.step >= context.job.train.steps)

    def state_dict(self) -> dict[str, Any]:
        """State of the sinks, each under its name. Collective, as a save is: pending work is finished first."""
        self._settle()
        if not self._sinks:
            # Saved before the run has begun: the state is passed on as it was loaded
            return dict(self._restored)
        return {f"{name}/{key}": v for name, (sink, _) in self._sinks.items() for key, v in sink.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keeps the state for sinks that are not built yet, and restores the others."""
        self._restored = dict(state)
        self._give_state(state)  # in a roll-back; when a run continues, no sink has been built yet

    def _give_state(self, state: Mapping[str, Any]) -> None:
        for name, (sink, _) in self._sinks.items():
            prefix = f"{name}/"
            own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            if own:
                sink.load_state_dict(own)

    def _settle(self) -> None:
        if self._unsettled:
            self._unsettled = False
            for sink, _ in self._sinks.values():
                sink.settle()
