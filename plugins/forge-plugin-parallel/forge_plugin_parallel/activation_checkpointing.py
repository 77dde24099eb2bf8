"""The component `activation_checkpointing`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import field, frozen
from attrs.validators import ge, gt, optional

from forge_core.contracts.components import ParallelComponent
from forge_core.contracts.errors import Problem

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.runtime import ParallelStage
    from forge_core.job import Job


@frozen(kw_only=True)
class ActivationCheckpointing(ParallelComponent):
    """Forgets what blocks computed on the way forward, and computes it again when the backward pass needs it (Chen et
    al. 2016). Losses and gradients stay the same; dropout draws the same numbers again.
    """

    after: ClassVar[Mapping[str, str]] = {
        "pp": "only the blocks that this rank keeps are wrapped",
        "float8": "it changes linear layers, and what is computed again must be the changed ones",
        "tp": "its collectives belong to what is computed again",
        "ep": "its collectives belong to what is computed again",
        "cp": "its collectives belong to what is computed again",
    }

    mode: Literal["full", "selective", "auto"] = "full"
    """full: of a block, only its input is kept. selective: results of matrix products and attention are kept, which are
    the slow ones, and all else is computed again. auto: whatever computes least of none, selective and full, by an
    estimate of what each takes; the plan of the run has the figures."""
    every: int = field(default=1, validator=ge(1))
    """Only every n-th block, beginning with the first: others keep everything."""
    memory_gb: float | None = field(default=None, validator=optional(gt(0)))
    """For auto: gigabytes (10⁹ bytes) that a rank may take. Default: what its device has free at the start."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        layers = getattr(job.model, "layers", None)
        if isinstance(layers, int) and self.every > layers:
            yield Problem("every", f"{self.every}, but the model has {layers} layers; lower it, or leave the stage out")
        if self.memory_gb is not None and self.mode != "auto":
            yield Problem("memory_gb", f'is for mode = "auto", but mode is "{self.mode}"; leave it out')

    def build(self, context: BuildContext) -> ParallelStage:
        from forge_plugin_parallel.checkpointing_stage import CheckpointingStage

        return CheckpointingStage(self, context)
