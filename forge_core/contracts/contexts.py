"""Contexts that components, hooks and evaluations receive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from attrs import define, evolve, field, frozen

from forge_core.contracts.errors import ExitCode, ForgeError
from forge_core.contracts.run_end import Cause, End, one_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from forge_core.auxiliary import Auxiliary
    from forge_core.contracts.components import Built, Component
    from forge_core.contracts.data import Batch, Dataset, Tokenizer
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.contracts.runtime import Executor, State, StepOutput
    from forge_core.job import Job


class Builder(Protocol):
    """The part of `forge_core.plugins.manager.Plugins` that `BuildContext` uses."""

    catalog: Any
    """The `Catalog`, a class of a higher floor."""

    def build(self, component: Component[Built], context: BuildContext, **inputs: Any) -> Built: ...


@frozen(kw_only=True)
class BuildContext:
    """Read-only surroundings of a component that is being built."""

    job: Job
    plugins: Builder
    layout: Layout
    mesh: DeviceMesh | None
    """None only where no process group exists (single process)."""
    device: torch.device
    dtype: torch.dtype
    """Compute dtype, as returned by `Model.embed`. For parameters, see `OptimizerComponent.parameter_dtype`."""
    auxiliary: Auxiliary
    """Auxiliary losses and module metrics attach here."""
    tokenizer: Tokenizer | None = None
    folder: Path | None = None
    """The run folder, or None when nothing is kept."""
    path: str = ""
    """Where in the model: `layers.3.ffn`. Empty outside a model."""
    layer: int | None = None
    """Global number of the layer that is being built, if any."""

    def build(self, component: Component[Built], **inputs: Any) -> Built:
        """Build a nested component: through `forge_build_<kind>` where such a hook exists, else by its own `build`.

        Raises a `PluginError` if the builder returned None or failed (with the distribution's name and the cause).
        """
        # The only way to build a component inside another: called by itself, `component.build` would skip the hooks.
        return self.plugins.build(component, self, **inputs)

    def type_of(self, component: Component) -> str:
        """The type of a component with the distribution that offers it, as in `forge-plugin-lion/lion`."""
        return self.plugins.catalog.type_of(type(component))

    def load_object(self, spec: str) -> Any:
        """An object in the user's own code: `package.module:name`, or `./file.py:name` from the working directory."""
        # Not by importlib: the catalog keeps the SHA-256 of the file for the provenance of the run.
        return self.plugins.catalog.load_object(spec)

    def at(self, name: str, layer: int | None = None) -> BuildContext:
        """This context for a part of the model called `name` below the present path."""
        path = f"{self.path}.{name}" if self.path else name
        return evolve(self, path=path, layer=self.layer if layer is None else layer)


class Engine(Protocol):
    """The part of the run loop that hooks use through their contexts."""

    def seconds(self) -> Mapping[str, float]:
        """Seconds that this rank has spent in each phase of the run so far, by the name of the phase."""
        ...

    def take_state(self) -> State:
        """The state after the last completed step, copied, as a checkpoint would contain it."""
        ...

    def log_artifact(self, path: Path, name: str, step: int) -> None:
        """Hand a file to the loggers that take files; on ranks other than 0 there are none."""
        ...


@define(kw_only=True)
class Requests:
    """Requests of hooks and signals. Ranks may differ until the point of the step where they agree."""

    skip: str = ""
    """Why this step's update shall be skipped; cleared at each step."""
    checkpoint: bool = False
    stop: str = ""
    """Why the run shall end, in one line."""
    cause: Cause = Cause.REQUEST
    """Kind of that end."""
    signal: str = ""
    final: bool = False
    """Whether the run shall end for good, and not be continued by the same command."""
    non_finite: str = ""
    rollback: Rollback | None = None


@frozen(kw_only=True)
class Rollback:
    """A request to go back; see `StepContext.request_rollback`."""

    reason: str
    step: int | None = None
    """The newest checkpoint up to this step is meant; None: the newest of all."""
    state: State | None = None
    leave_out: int = 0
    with_data: bool = False
    """Whether progress, data and all hooks go back, too."""


@define(kw_only=True)
class TrainContext:
    """Live references to the objects of a training run."""

    job: Job
    model: Model
    optimizer: torch.optim.Optimizer
    tokenizer: Tokenizer | None
    folder: Path | None
    step: int
    """Completed steps."""
    requests: Requests = field(factory=Requests, repr=False)
    engine: Engine | None = field(default=None, repr=False)
    """The run loop; None where a hook is tried without one."""
    build: BuildContext | None = field(default=None, repr=False)
    """Mesh, layout, device and plugins of the run; None where a hook is tried without one, as for `executor`."""
    executor: Executor | None = field(default=None, repr=False)
    """Runs the model under the layout of the run: a hook evaluates by it, as evaluations do. Collective."""
    checkpoints: Callable[[], list[int]] = field(default=list, repr=False)
    """Returns the steps of the committed checkpoints, ascending. Collective."""

    def end(self) -> End:
        """How the run ends after this step if nothing fails any more: for `on_train_end`."""
        requests = self.requests
        if self.step >= self.job.train.steps:
            return End(code=ExitCode.FINISHED, cause=Cause.FINISHED, step=self.step)
        code = ExitCode.FINISHED if requests.final or requests.cause is Cause.PLANNED else ExitCode.STOPPED
        return End(
            code=code,
            cause=requests.cause,
            reason=requests.stop,
            signal=requests.signal,
            final=requests.final,
            step=self.step,
        )

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds that this rank has spent in each phase of the run so far, the present one included.

        Names are the values of `Phase`; each hook has a separate one, such as `hook hooks.ema`: see `Phase.of`.
        """
        return self._engine.seconds()

    def take_state(self) -> State:
        """All that a checkpoint holds, copied in memory: this rank's part of each tensor, on its device. Collective."""
        return self._engine.take_state()

    def put_state(self, state: State) -> None:
        """Go back, before the next step, to a state that `take_state` returned: progress and data too.

        Every rank calls this in the same step, with its own part. The lines of repeated steps are written again.
        """
        self.requests.rollback = Rollback(reason="a state was put back", state=state, with_data=True)

    def log_artifact(self, path: Path, name: str = "") -> None:
        """Hand a file to the loggers that take files, under `name` (by default its own); a call on rank 0 counts."""
        if self.engine is not None:  # a hook that is tried without a run has no loggers
            self.engine.log_artifact(path, name or path.name, self.step)

    @property
    def _engine(self) -> Engine:
        if self.engine is None:
            raise ForgeError("this context has no run loop, which keeps seconds and state")
        return self.engine


@define(kw_only=True)
class StepContext(TrainContext):
    """One step, for hooks. `step` is the number of this step's update, from 1."""

    batches: Sequence[Batch] = ()
    """The micro-batches of this rank. `on_step_begin` may put other rows in their place, by
    `forge_kit.nn.batches.replace_rows`."""
    output: StepOutput | None = None
    """This rank's loss sum and count; None before the forward passes. On the device."""
    loss: Tensor | None = None
    """Mean loss of the global batch before the update, the same on every rank. On the device."""
    grad_norm: Tensor | None = None
    """Global norm before clipping; None until it is computed. On the device."""
    skipped: bool | None = None
    """Whether the update was skipped; None before it, and where the answer is available only on the device."""
    may_skip: bool = False
    """Whether some hook of the run declares `may_skip`."""
    logged: dict[str, Any] = field(factory=dict)

    def skip_update(self, reason: str) -> None:
        """Leave out this step's update; only in `on_gradients`, and for hooks that declare `may_skip`."""
        if not self.may_skip:  # then the engine does not wait for the decision
            raise ForgeError("a hook that calls skip_update must declare `may_skip: ClassVar[bool] = True`")
        self.requests.skip = reason

    def request_checkpoint(self) -> None:
        """Save after this step."""
        self.requests.checkpoint = True

    def request_stop(self, reason: str, final: bool = False, cause: Cause = Cause.REQUEST) -> None:
        """Save after this step and end the run: to be continued (exit code 75), or as a `final` one (exit code 0).

        A final end is recorded in the checkpoint: the same command then reports it and trains no further.

        Args:
            reason: for people. It is one line in the run's `end.json`: line breaks and other runs of whitespace become
                one space.
            final: end the run for good.
            cause: `Cause.TIME` if the time of the job is nearly over, by which schedulers decide about another start.
        """
        self.requests.stop, self.requests.final = one_line(reason), final or self.requests.final
        self.requests.cause = cause

    def request_rollback(self, reason: str, to: int | State | None = None, leave_out: int = 0) -> None:
        """Go back to an earlier state of model, optimizer, hooks and plugins, while steps, schedules and data continue.

        Hooks that declare `rolls_back = False` keep their own state. The run goes back before the next step, once the
        ranks have agreed: a request from one rank is enough, unless `to` is a state, of which each has its own part.

        Args:
            reason: in words, for the user.
            to: where to: the newest intact checkpoint (None), the newest one up to a step, or a state that
                `take_state` returned.
            leave_out: number of further steps whose data are left out, which then count as skipped (PaLM, Chowdhery et
                al. 2022, section 5.1, restarted about 100 steps before a spike and skipped 200 to 500 batches).
        """
        step, state = (to, None) if to is None or isinstance(to, int) else (None, to)
        self.requests.rollback = Rollback(reason=reason, step=step, state=state, leave_out=leave_out)

    def log(self, name: str, value: float | Tensor) -> None:
        """Add a number to this step's line of metrics. A tensor is a device scalar, the same on every rank."""
        self.logged[name] = value


@define(kw_only=True)
class CheckpointContext(TrainContext):
    """A checkpoint that was saved or loaded."""

    path: Path


@frozen(kw_only=True)
class EvaluationContext:
    """Everything that an evaluation may use. The model is in evaluation mode, gradients are off."""

    job: Job
    build: BuildContext
    step: int
    model: Model
    """This rank's part, as stages left it; run it by `executor`. Called by itself, it may compute something else, or
    keep gathered weights that change later."""
    executor: Executor
    """`evaluate([batch])` returns the job's loss, `evaluate([batch], measure)` another one, under every layout."""
    held_out: Dataset | None
    """Held-out sequences of all sources together, in a fixed order."""
    batches: Callable[[Dataset, int], Iterable[Batch]]
    """`batches(dataset, count)`: this rank's share of `count` sequences (0: all), spread evenly over the dataset, the
    same at each call and under every layout; in micro-batches of equal shape on the device, equally many on every rank.
    Rows left over have only ignored labels. Each is progress for the watchdog."""
    all_reduce: Callable[[Tensor], Tensor]
    """Sums a tensor over the token dimensions, in place."""


Evaluation = Callable[[EvaluationContext], Mapping[str, float]]
"""Returns metrics, keyed as they are logged. Called on every rank, with the model in evaluation mode."""
