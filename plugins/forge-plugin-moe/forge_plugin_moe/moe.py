"""The component `moe`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import ge, gt

from forge_core.contracts.components import RouterComponent, default_type, when_resumed
from forge_core.contracts.errors import Problem
from forge_plugin_moe.routers import isolation_problem
from forge_plugin_transformer import FFNComponent, InitStd

if TYPE_CHECKING:
    from torch import nn

    from forge_core.config.job import Job
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout


@frozen(kw_only=True)
class MoE(FFNComponent):
    """Σ weight x expert(x) over the experts that a router gives each token, each a SwiGLU of its own, and shared
    experts that every token goes through (Shazeer et al. 2017; Dai et al. 2024, "DeepSeekMoE").

    Weights of the routed experts are stacked: `experts.gate.weight` and `experts.up.weight` (E, hidden, dim),
    `experts.down.weight` (E, dim, hidden). No expert is padded to the fullest one.
    """

    experts: int = field(default=8, validator=gt(0))
    """Routed experts, E."""
    hidden: int = field(default=0, validator=ge(0))
    """Width between the matrices of an expert; 0: 8/3 of `dim`, rounded up to a multiple of 256. Fine-grained experts
    have a fraction of it."""
    router: RouterComponent = default_type("forge-plugin-moe/softmax_topk")
    """`[model.ffn.router]`: which experts a token goes through, and with which weights."""
    capacity_factor: float = field(default=0.0, validator=ge(0))
    """Of each sequence, an expert takes at most this times its even share of the tokens, those with the largest
    weights; others pass it by, and are counted as `moe/dropped`. 0: as many as come. In training only: what a position
    comes to would depend on later ones. Refused with a packing that isolates documents."""
    shared_experts: int = field(default=0, validator=ge(0))
    """Experts that every token goes through, with weight 1: one SwiGLU of so many times `hidden`."""
    shared_gate: bool = False
    """Whether the output of the shared experts is multiplied by the sigmoid of a linear function of the token
    (Qwen2-MoE)."""
    first_dense: int = field(default=0, validator=ge(0))
    """So many layers, from the first on, have `dense` instead (DeepSeek-V3: 3)."""
    every: int = field(default=1, validator=gt(0))
    """Of the rest, each so-many-th layer has experts, the last of every group; others have `dense`."""
    dense: FFNComponent = default_type("forge-plugin-transformer/swiglu")
    """`[model.ffn.dense]`: of layers without experts."""
    backend: Literal["auto", "grouped_mm", "loop"] = field(default="auto", metadata=when_resumed("safe"))
    """grouped_mm: torch's product of all experts in one kernel. loop: a product for each expert, after waiting for
    their sizes. auto: the first where it runs."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if self.shared_gate and not self.shared_experts:
            yield Problem("shared_gate", "is for shared experts, and there are none; set shared_experts")
        if self.capacity_factor and job.data.packing.isolates:
            yield Problem("capacity_factor", isolation_problem("an expert's capacity is filled"))
        yield from (problem.below("router") for problem in self.router.expert_problems(self.experts))

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        assert context.layer is not None
        if context.layer < self.first_dense or (context.layer - self.first_dense + 1) % self.every:
            return context.build(self.dense, dim=dim, init=init)
        from forge_plugin_moe.modules.layer import MoELayer

        return MoELayer(self, context, dim, init)
