"""The component `activation_offload`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import ParallelComponent
from forge_core.contracts.errors import Problem

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.runtime import ParallelStage
    from forge_core.job import Job

CANNOT = {
    "activation_checkpointing": "it keeps the inputs of blocks where no hook of autograd sees them, and recomputes the "
    "rest: little would move; take one of the two",
    "compile": "a compiled block decides what it saves, outside of the hooks; leave out one of the two",
}


@frozen(kw_only=True)
class ActivationOffload(ParallelComponent):
    """Moves what blocks save for the backward pass to the memory of the host, and back when it is needed.

    Nothing is rounded or recomputed; kernels may round differently for another place in memory. On a GPU, copies use
    pinned memory and a separate stream, beside the computation. On a CPU there is no other memory to move to: copies
    are made all the same, so that a job can be tried, and no memory is saved.
    """

    after: ClassVar[Mapping[str, str]] = {
        "pp": "only the blocks that this rank keeps are wrapped",
        "float8": "it replaces linear layers, whose inputs move too",
        "tp": "its collectives are part of the blocks",
        "ep": "its collectives are part of the blocks",
        "cp": "its collectives are part of the blocks",
    }
    before: ClassVar[Mapping[str, str]] = {"fsdp": "parameters are gathered around the blocks, and are left in place"}

    min_mb: float = field(default=1.0, validator=ge(0))
    """Tensors of fewer megabytes (10⁶ bytes) stay on the device: starting a copy takes longer than it saves."""
    every: int = field(default=1, validator=ge(1))
    """Move activations of every n-th block only, beginning with the first: fewer bytes to copy, less memory saved."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks `every` against the layers, and refuses stages that hide what they save."""
        layers = getattr(job.model, "layers", None)
        if isinstance(layers, int) and self.every > layers:
            yield Problem("every", f"{self.every}, but the model has {layers} layers; lower it, or leave the stage out")
        for name, why in CANNOT.items():
            if name in job.parallel:
                yield Problem("", f"cannot be beside parallel.{name}: {why}")

    def build(self, context: BuildContext) -> ParallelStage:
        from forge_plugin_compile.offload.stage import OffloadStage

        return OffloadStage(self, context.device)
