"""What a component is given when it is built."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from forge_core.auxiliary import Auxiliary
    from forge_core.components import Component
    from forge_core.config.job import Job
    from forge_core.parallel.layout import Layout
    from forge_core.plugins.manager import Plugins
    from forge_core.protocols import Tokenizer


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
    """Compute dtype: what `Model.embed` emits. Parameters are float32 (float64 when this is float64), or what
    the optimizer's `parameter_dtype` says."""
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
