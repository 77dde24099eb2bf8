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
    from forge_plugin_taps.taps import Taps


@define(kw_only=True, slots=False)
class TapsHook(TrainingHook):
    """Records every `interval`-th step and passes its samples to the sinks."""

    component: Taps = field(repr=False)

    def __attrs_post_init__(self) -> None:
        self._sinks: dict[str, tuple[Sink, list[str]]] = {}
        self._restored: Mapping[str, Any] = {}

    def on_train_begin(self, context: TrainContext) -> None:
        from forge_plugin_taps.recorder import recorder_of
        from forge_plugin_taps.selection import matching

        if context.build is None:
            raise ForgeError("taps need the run loop's own contexts")
        recorder = recorder_of(context.model)
        info = recorder.agree()
        for name, edit in self.component.edits.items():
            recorder.add_edit(name, edit, info)
        recorder.current.edits = frozenset(name for name, edit in self.component.edits.items() if edit.in_training)
        for name, component in self.component.sinks.items():
            names = matching(component.points or ("*",), list(info.points))
            own = evolve(info, points={point: info.points[point] for point in names})
            self._sinks[name] = context.build.build(component, taps=own), names
        for name, (sink, _) in self._sinks.items():
            prefix = f"{name}/"
            state = {key.removeprefix(prefix): value for key, value in self._restored.items() if key.startswith(prefix)}
            if state:
                sink.load_state_dict(state)
            sink.start(context.step)

    def on_step_begin(self, context: StepContext) -> None:
        from forge_plugin_taps.recorder import recorder_of

        if context.step % self.component.interval == 0:
            recorder_of(context.model).begin(context.step)

    def on_step_end(self, context: StepContext) -> None:
        from forge_plugin_taps.recorder import recorder_of

        if context.step % self.component.interval:
            return
        recorder = recorder_of(context.model)
        sample = recorder.end()
        for sink, names in self._sinks.values():
            sink.consume(sample.of(names))
            for name, value in sink.metrics().items():
                context.log(name, value)
        recorder.clear()

    def on_train_end(self, context: TrainContext) -> None:
        for sink, _ in self._sinks.values():
            sink.close(final=context.step >= context.job.train.steps)

    def state_dict(self) -> dict[str, Any]:
        return {f"{name}/{key}": v for name, (sink, _) in self._sinks.items() for key, v in sink.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restored = dict(state)
