"""What a component is given when it is built, and what an evaluation is given when it runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from forge_core.components import Component
    from forge_core.config.job import Job
    from forge_core.engine.auxiliary import Auxiliary
    from forge_core.parallel.layout import Layout
    from forge_core.plugins.manager import Plugins
    from forge_core.protocols import Batch, Dataset, Executor, Model, Tokenizer


@frozen(kw_only=True)
class BuildContext:
    """Read-only surroundings of a component that is being built.

    `context.build(component, **inputs)` is the only way to build a component inside another: hooks then see it too.
    """

    job: Job
    plugins: Plugins
    layout: Layout
    mesh: DeviceMesh | None
    """None only where no process group exists (single process)."""
    device: torch.device
    dtype: torch.dtype
    """Compute dtype: what `Model.embed` emits. Parameters are float32 (float64 when this is float64)."""
    auxiliary: Auxiliary
    """Auxiliary losses and module metrics attach here."""
    tokenizer: Tokenizer | None = None
    folder: Path | None = None
    """The run folder, or None when nothing is kept."""
    path: str = ""
    """Where in the model: `layers.3.ffn`. Empty outside a model."""
    layer: int | None = None
    """Global number of the layer that is being built, if any."""

    def build(self, component: Component, **inputs: Any) -> Any:
        """Build a nested component: through `forge_build_<kind>` where such a hook exists, else by its own `build`.

        Raises:
            PluginError: the builder returned None, or failed (with the distribution's name and the cause).
        """
        return self.plugins.build(component, self, **inputs)

    def at(self, name: str, layer: int | None = None) -> BuildContext:
        """This context for a part of the model called `name` below the present path."""
        path = f"{self.path}.{name}" if self.path else name
        return attrs.evolve(self, path=path, layer=self.layer if layer is None else layer)


@frozen(kw_only=True)
class EvaluationContext:
    """What an evaluation may use. The model is in evaluation mode, gradients are off."""

    job: Job
    build: BuildContext
    step: int
    model: Model
    executor: Executor
    held_out: Dataset | None
    """Held-out sequences of all sources together, in a fixed order."""

    def batches(self, dataset: Dataset, count: int) -> Iterable[Batch]:
        """This rank's share of the first `count` sequences, in batches of the job's micro-batch size, on the device.

        Every rank gets equally many batches of equal shape; where the sequences do not suffice, the remaining rows
        have only ignored labels.
        """
        from forge_core.data.loader import evaluation_batches

        return evaluation_batches(dataset, count, self.job, self.build)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the token dimensions, in place."""
        from forge_core.parallel.mesh import all_reduce_tokens

        return all_reduce_tokens(tensor, self.build.mesh)
