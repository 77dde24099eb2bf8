"""Training hooks: the order in which they run, what they receive, and how they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.config.keys import walk_components
from forge_core.contracts import contexts  # not its names: this module forwards them from where they were
from forge_core.contracts.components import TrainingHook
from forge_core.launch.progress_beacon import ProgressBeacon
from forge_core.moved import forwarding

if TYPE_CHECKING:
    from forge_core.contracts.contexts import CheckpointContext, Requests, StepContext, TrainContext
    from forge_core.contracts.data import Batch
    from forge_core.engine.build import Run
    from forge_core.job import Job
    from forge_core.plugins.manager import Plugins

__getattr__ = forwarding(__name__, ["forge_core.contracts.contexts"])

EVENTS = tuple(name for name in vars(TrainingHook) if name.startswith("on_"))


def collect_hooks(job: Job, plugins: Plugins, given: Iterable[TrainingHook]) -> dict[str, TrainingHook]:
    """Every hook of a run by name, in the order in which they run, which is the same on every rank."""
    # Hooks may communicate, hence one order. Those that components bring belong to what is trained, and come first;
    # those of plugins, of `[hooks]` and from Python observe it.
    hooks: dict[str, TrainingHook] = {}
    for path, component in walk_components(job):
        if isinstance(component, TrainingHook):
            continue
        for hook in component.training_hooks(job):
            _add(hooks, f"{path}.{type(hook).__name__}", hook)
    for hook in plugins.training_hooks(job):
        _add(hooks, f"plugins.{type(hook).__name__}", hook)
    for name, hook in job.hooks.items():
        _add(hooks, f"hooks.{name}", hook)
    for hook in given:
        _add(hooks, f"python.{type(hook).__name__}", hook)
    return hooks


def _add(hooks: dict[str, TrainingHook], name: str, hook: TrainingHook) -> None:
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    hooks[next(unique for unique in names if unique not in hooks)] = hook


class HookRunner:
    """Calls the hooks of each event, in order.

    Args:
        hooks: by name.
        beacon: receives each call of a hook as a phase, for the watchdog.
    """

    def __init__(self, hooks: Mapping[str, TrainingHook], beacon: ProgressBeacon | None = None) -> None:
        self.hooks = dict(hooks)
        self.beacon = beacon or ProgressBeacon()
        # Found once: an event that no hook listens to costs an empty loop.
        self._listeners: dict[str, list[tuple[str, Callable[..., None]]]] = {
            event: [
                (name, getattr(hook, event))
                for name, hook in hooks.items()
                if getattr(type(hook), event) is not getattr(TrainingHook, event)
            ]
            for event in EVENTS
        }

    @property
    def may_skip(self) -> bool:
        """Whether some hook may ask to skip an update."""
        return any(hook.may_skip for hook in self.hooks.values())

    def __call__(self, event: str, *args: Any) -> None:
        for name, method in self._listeners[event]:
            self.beacon.enter(f"hook {name}, {event}")
            try:
                method(*args)
            except Exception as error:
                error.add_note(f"in hook {name}, {event}")
                raise

    def exception(self, context: TrainContext, error: BaseException) -> None:
        """Call `on_exception` of every hook."""
        for _, method in self._listeners["on_exception"]:
            with suppress(Exception):  # the first error is the one to report
                method(context, error)


class Contexts:
    """Makes what hooks receive: live references to one run, and the requests that they share with signals.

    A step is that which is under way, from 1; for `train` and `checkpoint`, the number of completed ones.
    """

    def __init__(self, run: Run, requests: Requests) -> None:
        common = {"job": run.job, "model": run.model, "optimizer": run.optimizer}
        self._common: dict[str, Any] = {**common, "tokenizer": run.context.tokenizer, "folder": run.context.folder}
        self._hooks = run.hooks
        self._requests = requests

    def train(self, step: int) -> TrainContext:
        return contexts.TrainContext(**self._common, step=step)

    def step(self, step: int, batches: Sequence[Batch] = ()) -> StepContext:
        requests = self._requests.for_step()
        return contexts.StepContext(
            **self._common, step=step, batches=batches, may_skip=self._hooks.may_skip, requests=requests
        )

    def checkpoint(self, step: int, path: Path) -> CheckpointContext:
        return contexts.CheckpointContext(**self._common, step=step, path=path)

    def saved(self, step: int, path: Path) -> None:
        self._hooks("on_checkpoint_save", self.checkpoint(step, path))
