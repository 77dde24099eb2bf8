"""Training hooks: the order in which they run, what they receive, and how they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, count
from typing import Any

from forge_core.config.keys import walk_components
from forge_core.contracts.components import TrainingHook
from forge_core.contracts.contexts import TrainContext
from forge_core.contracts.phase import Phase
from forge_core.job import Job
from forge_core.launch.progress_beacon import ProgressBeacon
from forge_core.plugins.manager import Plugins

EVENTS = tuple(name for name in vars(TrainingHook) if name.startswith("on_"))


def collect_hooks(job: Job, plugins: Plugins, given: Iterable[TrainingHook]) -> dict[str, TrainingHook]:
    """Every hook of a run by name, in the order in which they run, which is the same on every rank."""
    # Hooks may communicate, hence one order: first the hooks of the trained parts, then the hooks that observe them.
    parts = [(path, part) for path, part in walk_components(job) if not isinstance(part, TrainingHook)]
    entries = [(f"{path}.{type(hook).__name__}", hook) for path, part in parts for hook in part.training_hooks(job)]
    entries += [(f"plugins.{type(hook).__name__}", hook) for hook in plugins.training_hooks(job)]
    entries += [(f"hooks.{name}", hook) for name, hook in job.hooks.items()]
    entries += [(f"python.{type(hook).__name__}", hook) for hook in given]
    hooks: dict[str, TrainingHook] = {}
    for name, hook in entries:
        names = chain([name], (f"{name}-{number}" for number in count(2)))
        hooks[next(unique for unique in names if unique not in hooks)] = hook
    return hooks


@contextmanager
def named(part: str) -> Iterator[None]:
    """Add to an exception which part of the job raised it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {part}")
        raise


class HookRunner:
    """Calls the hooks of each event, in order; each call is a phase of `beacon`, for the watchdog."""

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
        """Whether a hook may ask to skip an update, on which ranks then agree in each step."""
        return any(hook.may_skip for hook in self.hooks.values())

    def __call__(self, event: str, *args: Any) -> None:
        before = self.beacon.position
        for name, method in self._listeners[event]:
            self.beacon.enter(Phase.HOOK, None, name, event)
            with named(f"hook {name}, {event}"):
                method(*args)
            # The time from here on is not the hook's: a save continues after a call of its hooks
            self.beacon.enter(before.phase, None, before.hook, before.detail)

    def exception(self, context: TrainContext, error: BaseException) -> None:
        """Call `on_exception` of all hooks, whose own errors are dropped."""
        for _, method in self._listeners["on_exception"]:
            with suppress(Exception):  # the first error is the one to report
                method(context, error)
