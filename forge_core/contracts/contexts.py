"""Contexts that components, hooks and evaluations receive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs
from attrs import define, field, frozen

from forge_core.contracts.errors import ForgeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from forge_core.auxiliary import Auxiliary
    from forge_core.contracts.components import Built, Component
    from forge_core.contracts.data import Batch, Dataset, Tokenizer
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.contracts.runtime import Executor, StepOutput
    from forge_core.job import Job


class Builder(Protocol):
    """The part of `forge_core.plugins.manager.Plugins` that `BuildContext` uses."""

    def build(self, component: Component[Built], context: BuildContext, **inputs: Any) -> Built: ...
    def type_of(self, component: Component) -> str: ...
    def load_object(self, spec: str) -> Any: ...


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
    """Compute dtype: that of the output of `Model.embed`. For parameters, see `OptimizerComponent.parameter_dtype`."""
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

        A `PluginError` says that the builder returned None, or failed (with the distribution's name and the cause).
        """
        # The only way to build a component inside another: called by itself, `component.build` would skip the hooks.
        return self.plugins.build(component, self, **inputs)

    def type_of(self, component: Component) -> str:
        """The type of a component with the distribution that offers it, as in `forge-plugin-lion/lion`."""
        return self.plugins.type_of(component)

    def load_object(self, spec: str) -> Any:
        """An object in the user's own code: `package.module:name`, or `./file.py:name` from the working directory."""
        # Not by importlib: the catalog keeps the SHA-256 of the file for the provenance of the run.
        return self.plugins.load_object(spec)

    def at(self, name: str, layer: int | None = None) -> BuildContext:
        """This context for a part of the model called `name` below the present path."""
        path = f"{self.path}.{name}" if self.path else name
        return attrs.evolve(self, path=path, layer=self.layer if layer is None else layer)


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
    """Requests of hooks and signals. Ranks may differ until the point of the step where they agree."""

    skip: str = ""
    """Why this step's update shall be skipped; cleared at each step."""
    checkpoint: bool = False
    stop: str = ""
    non_finite: str = ""


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
        """Leave out this step's update; only in `on_gradients`, and for hooks that declare `may_skip`."""
        if not self.may_skip:  # then the engine does not wait for the decision
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
