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


FAILS_IN_TORCH = (
    '"full" fails inside compiled blocks under tp, where torch 2.13 takes the DeviceMesh for a tensor to keep; '
    'set mode = "selective", or leave out parallel.compile'
)


def fails_in_torch(job: Job, layout: Layout) -> bool:
    """Whether compiled blocks hold collectives of `tp`, which `full` cannot recompute there."""
    return "compile" in job.parallel and layout.degree("tp") > 1


@frozen(kw_only=True)
class ActivationCheckpointing(ParallelComponent):
    """Activation checkpointing (Chen et al. 2016).

    It frees activations of blocks in the forward pass, and recomputes them for the backward pass. Losses and gradients
    stay the same; dropout draws the same numbers again.
    """

    after: ClassVar[Mapping[str, str]] = {
        "pp": "only the blocks that this rank keeps are wrapped",
        "float8": "it replaces linear layers, and the replacements must be recomputed",
        "tp": "its collectives are part of the recomputation",
        "ep": "its collectives are part of the recomputation",
        "cp": "its collectives are part of the recomputation",
    }

    mode: Literal["full", "selective", "auto"] = "full"
    """full: only the input of a block is saved. selective: results of matrix products and attention, the slow
    operations, are saved, and all others are recomputed. auto: the first of none, selective and full whose estimated
    memory fits; `forge-run plan` prints the figures."""
    every: int = field(default=1, validator=ge(1))
    """Recompute every n-th block only, beginning with the first; others save all activations."""
    memory_gb: float | None = field(default=None, validator=optional(gt(0)))
    """For auto: gigabytes (10⁹ bytes) that a rank may use. Default: free memory of its device at the start."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks `every` against the layers, `memory_gb` against the mode, and `full` with compiled blocks under tp."""
        # Of models that have such a key; others are not built when a job is checked
        layers = getattr(job.model, "layers", None)
        if isinstance(layers, int) and self.every > layers:
            yield Problem("every", f"{self.every}, but the model has {layers} layers; lower it, or leave the stage out")
        if self.memory_gb is not None and self.mode != "auto":
            yield Problem("memory_gb", f'is for mode = "auto", but mode is "{self.mode}"; leave it out')
        if self.mode == "full" and fails_in_torch(job, layout):
            yield Problem("mode", FAILS_IN_TORCH)

    def build(self, context: BuildContext) -> ParallelStage:
        """Returns a stage that chooses what auto means when it is applied, after the stages that split the model."""
        from forge_plugin_parallel.checkpointing_stage import CheckpointingStage

        return CheckpointingStage(self, context)
