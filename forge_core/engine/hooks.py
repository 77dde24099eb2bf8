"""What training hooks see and may ask for, and the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field

from forge_core.components import TrainingHook
from forge_core.config.walk import walk_components
from forge_core.errors import ForgeError
from forge_core.launch.phases import Phases

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from forge_core.config.job import Job
    from forge_core.plugins.manager import Plugins
    from forge_core.protocols import Batch, Model, StepOutput, Tokenizer

EVENTS = tuple(name for name in vars(TrainingHook) if name.startswith("on_"))


@define(kw_only=True)
class TrainContext:
    """Live references to what is trained."""

    job: Job
    model: Model
    optimizer: torch.optim.Optimizer
    tokenizer: Tokenizer | None
    folder: Path | None
    step: int
    """Completed steps."""


@define(kw_only=True)
class Requests:
    """What hooks and signals have asked for. Ranks may differ until the point of the step where they agree."""

    skip: str = ""
    """Why this step's update shall be skipped; one step long."""
    checkpoint: bool = False
    stop: str = ""
    non_finite: str = ""

    @property
    def ends_run(self) -> bool:
        return bool(self.stop or self.non_finite)

    def for_step(self) -> Requests:
        """The same object, ready for the next step."""
        self.skip = ""
        return self


@define(kw_only=True)
class StepContext(TrainContext):
    """One step, for hooks. `step` is the number of this step's update, from 1."""

    batches: Sequence[Batch] = ()
    output: StepOutput | None = None
    """This rank's loss sum and count; None before the forward passes. On the device."""
    grad_norm: Tensor | None = None
    """Global norm before clipping; None until it is computed. On the device."""
    skipped: bool | None = None
    """Whether the update was skipped; None before it, and where only the device knows."""
    may_skip: bool = False
    """Whether some hook of the run declares `may_skip`."""
    requests: Requests = field(factory=Requests)
    logged: dict[str, Any] = field(factory=dict)

    def skip_update(self, reason: str) -> None:
        """Leave out this step's update; only in `on_gradients`.

        Raises:
            ForgeError: no hook of this run declares `may_skip`, so the engine does not wait for the decision.
        """
        if not self.may_skip:
            raise ForgeError("a hook that calls skip_update must declare `may_skip: ClassVar[bool] = True`")
        self.requests.skip = reason

    def request_checkpoint(self) -> None:
        """Save after this step."""
        self.requests.checkpoint = True

    def request_stop(self, reason: str) -> None:
        """Save after this step and end the run (exit code 75)."""
        self.requests.stop = reason

    def log(self, name: str, value: float | Tensor) -> None:
        """Add a number to this step's line of metrics. A tensor is a device scalar, the same on every rank."""
        self.logged[name] = value


@define(kw_only=True)
class CheckpointContext(TrainContext):
    """A checkpoint that was saved or loaded."""

    path: Path


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
        self.phases = Phases()
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
