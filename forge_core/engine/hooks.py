"""What training hooks see and may ask for, and the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from forge_core.config.walk import walk_components
from forge_core.contracts.components import TrainingHook
from forge_core.launch.progress_beacon import ProgressBeacon
from forge_core.moved import forwarding

if TYPE_CHECKING:
    from forge_core.config.job import Job
    from forge_core.contracts.contexts import TrainContext
    from forge_core.plugins.manager import Plugins

__getattr__ = forwarding(__name__, ["forge_core.contracts.contexts"])

EVENTS = tuple(name for name in vars(TrainingHook) if name.startswith("on_"))


def collect_hooks(job: Job, plugins: Plugins, given: Iterable[TrainingHook]) -> dict[str, TrainingHook]:
    """Every hook of a run by name, in the order in which they run: those that components bring, in the order of the
    job's tables; those of plugins; those of `[hooks]`; those given from Python."""
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
    number = 2
    unique = name
    while unique in hooks:
        unique, number = f"{name}-{number}", number + 1
    hooks[unique] = hook


class HookRunner:
    """Calls the hooks of each event, in order. Events nobody listens to cost an empty loop.

    Attributes:
        phases: where this rank is; each call of a hook is a phase.
    """

    def __init__(self, hooks: Mapping[str, TrainingHook]) -> None:
        self.hooks = dict(hooks)
        self.phases = ProgressBeacon()
        self._listeners: dict[str, list[tuple[str, Callable[..., None]]]] = {
            event: [(name, getattr(hook, event)) for name, hook in hooks.items() if _overrides(hook, event)]
            for event in EVENTS
        }

    @property
    def may_skip(self) -> bool:
        """Whether some hook may ask to skip an update."""
        return any(hook.may_skip for hook in self.hooks.values())

    def __call__(self, event: str, *args: Any) -> None:
        for name, method in self._listeners[event]:
            self.phases.enter(f"hook {name}, {event}")
            try:
                method(*args)
            except Exception as error:
                error.add_note(f"in hook {name}, {event}")
                raise

    def exception(self, context: TrainContext, error: BaseException) -> None:
        """Tell every hook of `error`, whatever they raise themselves: the first error is the one to report."""
        for _, method in self._listeners["on_exception"]:
            with suppress(Exception):
                method(context, error)


def _overrides(hook: TrainingHook, event: str) -> bool:
    return getattr(type(hook), event) is not getattr(TrainingHook, event)
