"""The component `ep`."""

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
    from forge_core.contracts.model import Model
    from forge_core.contracts.runtime import ParallelStage
    from forge_core.job import Job


@frozen(kw_only=True)
class ExpertParallel(ParallelComponent):
    """Expert parallel (Lepikhin et al. 2020, GShard): `degree` ranks have different experts of each layer, and send
    each other the tokens that these compute. For models that declare their `expert_stacks()`.

    It takes no ranks of its own: every rank has data of its own, and `degree` of those that `fsdp` shards over (times
    `cp`) share the experts among them. `fsdp` shards each rank's experts over what is left.
    """

    after: ClassVar[Mapping[str, str]] = {
        "pp": "only the layers that this rank keeps are split",
        "float8": "it changes linear layers, and what is split must be the changed ones",
        "tp": "each rank's experts are what tp has left it of them",
    }
    before: ClassVar[Mapping[str, str]] = {
        "activation_checkpointing": "what is recomputed includes the exchange of tokens",
    }

    degree: int = field(validator=ge(1))
    """Ranks that share the experts of a layer. Divides their number, and `shard` x `cp`; neighbouring ranks, so those
    of a node if it is no larger."""
    ranks_per_node: int = field(default=0, validator=ge(0))
    """Of these, how many are on one node. If given, a token travels once to each other node that has any of its
    experts, to the rank with the same place there, and that node sends one sum back; within nodes it goes on to the
    ranks. 0: it travels to each rank by itself."""
    overlap: bool = True
    """Whether shared experts, or whatever else a model can compute meanwhile, are computed while tokens travel, and
    their gradients while the tokens' gradients do. Results are the same to the bit."""

    @property
    def waits_in_blocks(self) -> str:
        return "it waits for how many tokens go to each rank" if self.degree > 1 else ""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        ranks = layout.shard * layout.cp
        if ranks % self.degree:
            seen = f"{self.degree} does not divide shard {layout.shard} x cp {layout.cp} = {ranks}"
            fix = "change it" if ranks > 1 else "add [parallel.fsdp], whose ranks it divides"
            yield Problem("degree", f"{seen}; {fix}")
        if self.degree > 1 and (others := self._other_dimensions(layout)):
            seen = f"experts are shared and reduced over replicate, shard and cp, and not over {', '.join(others)}"
            yield Problem("degree", f"{seen}; leave the stage out")
        if self.ranks_per_node and self.ranks_per_node not in (allowed := self._parts()):
            seen = f"{self.ranks_per_node} ranks a node do not make several equal nodes of the {self.degree} ranks"
            fix = f"set it to {' or '.join(map(str, allowed))}, or leave it out" if allowed else "leave it out"
            yield Problem("ranks_per_node", f"{seen}; {fix}")

    def _other_dimensions(self, layout: Layout) -> list[str]:
        """Dimensions of other stages that hold different tokens, or that part `shard` from `cp`."""
        divided = [dimension for dimension, size in layout.sizes if size > 1]
        names = [dimension.name for dimension in divided]
        inside = names[names.index("shard") : names.index("cp")] if {"shard", "cp"} <= {*names} else []
        other = [dimension.name for dimension in divided if dimension.divides_tokens] + inside
        return [name for name in dict.fromkeys(other) if name not in ("replicate", "shard", "cp")]

    def _parts(self) -> list[int]:
        """Ranks of a node with which there is something to send between nodes and within them."""
        return [ranks for ranks in range(2, self.degree) if self.degree % ranks == 0]

    def model_problems(self, model: Model, layout: Layout) -> Iterable[Problem]:
        from forge_plugin_parallel.ep_stage import stack_problems

        return stack_problems(model, self.degree)

    def build(self, context: BuildContext) -> ParallelStage:
        from forge_plugin_parallel.ep_stage import ExpertParallelStage

        return ExpertParallelStage(self, context)
