"""The component `fsdp`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import ParallelComponent, positive_or_auto
from forge_core.contracts.errors import Problem
from forge_core.parallel.layout import micro_batches

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.runtime import ParallelStage
    from forge_core.job import Job


@frozen(kw_only=True)
class FSDP(ParallelComponent):
    """Fully sharded data parallel (torch's FSDP2; ZeRO-3, Rajbhandari et al. 2020).

    Parameters, gradients and optimizer state are split over the ranks, and each unit of the model is gathered only
    while it is computed.

    `replicate` copies of `shard` ranks each make it hybrid (HSDP). Context-parallel ranks share the sharding.
    """

    after: ClassVar[Mapping[str, str]] = {
        "pp": "only the layers that this rank keeps are sharded",
        "float8": "it changes linear layers, and the changed layers must be sharded",
        "tp": "a parameter that tp has split is split once more",
        "ep": "experts are sharded over the ranks that ep leaves",
        "cp": "its ranks share the sharding",
        "activation_checkpointing": "a block is gathered around its recomputation, not inside it",
        "compile": "parameters are gathered and freed around the compiled blocks",
    }
    owns_reduction: ClassVar[bool] = True

    shard: int | Literal["auto"] = field(default="auto", validator=positive_or_auto)
    """Ranks over which parameters are split; auto takes what other stages leave over."""
    replicate: int = field(default=1, validator=ge(1))
    """Copies of the sharded model; gradients are summed over `shard` first, then over the copies."""
    reshard_after_forward: bool | Literal["auto"] = "auto"
    """Whether a unit is freed after its forward pass and gathered again for the backward. False takes the memory of the
    whole model, and a third less communication. The root unit, with the head, is freed after the backward pass in any
    case. auto: true, except in a pipeline, where every micro-batch would gather again: there units stay
    gathered to the end of the step."""
    reduce_every_micro_batch: bool = False
    """Whether each micro-batch's gradients are reduced at once. That takes the memory of a shard of the gradients; by
    default they add up whole, and one reduction a step is made."""
    prefetch: int = field(default=0, validator=ge(0))
    """Units gathered ahead of the computed one, forward and backward. 0: torch's default, which gathers one ahead
    where it can."""

    offload: bool = False
    """Whether parameters, gradients and optimizer state live on the host, where the optimizer steps too. A unit is
    copied to the device when it is computed. Takes the least memory of the device, and much time."""

    def degrees(self) -> Mapping[str, int | str]:
        """`shard` may be "auto": all ranks that no other dimension takes."""
        return {"replicate": self.replicate, "shard": self.shard}

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks where `replicate` lies in the mesh, and keys that have no effect or fail with this layout."""
        outside = [dimension.name for dimension, size in layout.sizes if dimension.divides_tokens and size > 1]
        # The mesh of FSDP2 is (replicate, shard), where all other dimensions of tokens are part of `shard`
        if "replicate" in outside and outside[0] != "replicate":
            yield Problem("replicate", f"the dimension {outside[0]} lies outside its copies; leave replicate out")
        if self.reduce_every_micro_batch and micro_batches(job, layout)[0] == 1:
            yield Problem("reduce_every_micro_batch", "each rank has one micro-batch a step; leave it out")
        if self.reduce_every_micro_batch and layout.pp > 1:
            why = "a pipeline's micro-batches overlap, and are reduced together at the end of the step"
            yield Problem("reduce_every_micro_batch", f"{why}; leave it out")
        if self.reduce_every_micro_batch and job.optimizer.parameter_dtype == "bf16":
            why = "with parameters in bf16, gradients that are reduced one by one would add up in bf16"
            yield Problem("reduce_every_micro_batch", f"{why}; leave it out")
        splitting = [name for name, stage in job.parallel.items() if stage.splits_backward]
        if self.reshard_after_forward is True and splitting:
            why = f"parallel.{splitting[0]} computes gradients of weights apart from the backward pass"
            yield Problem("reshard_after_forward", f"{why}, so units must stay gathered; leave it out")

    def reshards(self, layout: Layout) -> bool:
        """Whether units are freed after their forward pass."""
        return layout.pp == 1 if self.reshard_after_forward == "auto" else self.reshard_after_forward

    def build(self, context: BuildContext) -> ParallelStage:
        from forge_plugin_parallel.fsdp_stage import FSDPStage

        return FSDPStage(self, context)
