"""The component `ep`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import ParallelComponent
from forge_core.contracts.errors import Problem
from forge_plugin_parallel.dispatchers import AllToAll, DispatcherComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.contracts.runtime import ParallelStage
    from forge_core.job import Job


@frozen(kw_only=True)
class ExpertParallel(ParallelComponent):
    """Expert parallel (Lepikhin et al. 2020, GShard): `degree` ranks hold different experts and exchange tokens.

    For models that define `expert_stacks()`.

    It adds no ranks: every rank reads its own data, and `degree` of the ranks that `fsdp` shards over (times `cp`)
    divide the experts. `fsdp` shards each rank's experts over the remaining ranks.
    """

    after: ClassVar[Mapping[str, str]] = {
        "pp": "only the layers that this rank keeps are split",
        "float8": "it replaces linear layers, and ep must split the replacements",
        "tp": "ep divides the experts that tp has split already",
    }
    before: ClassVar[Mapping[str, str]] = {
        "activation_checkpointing": "the recomputation includes the exchange of tokens",
    }

    degree: int = field(validator=ge(1))
    """Ranks that share the experts of a layer. Divides their number, and `shard` x `cp`. They are neighbours, and so on
    one node if `degree` is at most its ranks."""
    ranks_per_node: int = field(default=0, validator=ge(0))
    """How many of these ranks are on one node. If set, a token is sent once to each other node that holds any of its
    experts, to the rank with the same number there, which forwards it within the node and returns one sum. 0: a token
    is sent to each rank separately."""
    dispatcher: DispatcherComponent = field(factory=AllToAll)
    """`[parallel.ep.dispatcher]`: how tokens are moved to the ranks of their experts, and results back."""
    overlap: bool = True
    """Whether shared experts, or any other independent computation of the model, run while tokens are being sent, and
    their backward pass while the tokens' gradients are. Results are the same to the bit."""

    @property
    def waits_in_blocks(self) -> str:
        """The host reads how many tokens are sent in every layer with experts, and dispatchers are not compiled."""
        return "it waits for how many tokens go to each rank" if self.degree > 1 else ""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that the ranks divide `shard` x `cp`, that no other dimension divides tokens, and equal nodes."""
        ranks = layout.shard * layout.cp
        if ranks % self.degree:
            message = f"{self.degree} does not divide shard {layout.shard} x cp {layout.cp} = {ranks}"
            hint = "change it" if ranks > 1 else "add [parallel.fsdp], whose ranks it divides"
            yield Problem("degree", f"{message}; {hint}")
        if self.degree > 1 and (others := self._other_dimensions(layout)):
            message = f"experts are shared and reduced over replicate, shard and cp, and not over {', '.join(others)}"
            yield Problem("degree", f"{message}; leave the stage out")
        if self.ranks_per_node and self.ranks_per_node not in (allowed := self._parts()):
            message = f"{self.ranks_per_node} ranks a node do not make several equal nodes of the {self.degree} ranks"
            hint = f"set it to {' or '.join(map(str, allowed))}, or leave it out" if allowed else "leave it out"
            yield Problem("ranks_per_node", f"{message}; {hint}")
        if self.degree > 1:
            found = self.dispatcher.rank_problems(self.degree, self.ranks_per_node)
            yield from (problem.below("dispatcher") for problem in found)

    def _other_dimensions(self, layout: Layout) -> list[str]:
        """Dimensions of other stages that hold different tokens, or that lie between `shard` and `cp`."""
        divided = [dimension for dimension, size in layout.sizes if size > 1]
        names = [dimension.name for dimension in divided]
        # Ranks of `shard` and `cp` are rearranged together, which needs them side by side in the mesh
        inside = names[names.index("shard") : names.index("cp")] if {"shard", "cp"} <= {*names} else []
        other = [dimension.name for dimension in divided if dimension.divides_tokens] + inside
        return [name for name in dict.fromkeys(other) if name not in ("replicate", "shard", "cp")]

    def _parts(self) -> list[int]:
        """Values of `ranks_per_node` with several nodes, and several ranks on each."""
        return [ranks for ranks in range(2, self.degree) if self.degree % ranks == 0]

    def model_problems(self, model: Model, layout: Layout) -> Iterable[Problem]:
        """Checks that there are experts, and that the ranks can share them equally."""
        from forge_plugin_parallel.ep_stage import stack_problems

        return stack_problems(model, self.degree)

    def build(self, context: BuildContext) -> ParallelStage:
        from forge_plugin_parallel.ep_stage import ExpertParallelStage

        return ExpertParallelStage(self, context)
