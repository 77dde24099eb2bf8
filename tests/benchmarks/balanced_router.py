"""A router that gives all experts equally many tokens, and computes as much as one that decides."""

from __future__ import annotations

import torch
from attrs import frozen

from forge_plugin_moe import SoftmaxTopK
from forge_plugin_moe.modules.topk import SoftmaxRouter


class BalancedRouter(SoftmaxRouter):
    """The choices of one token after the other run through the experts, again and again."""

    def forward(self, x, batch):
        weights, chosen = super().forward(x, batch)
        experts = self.weight.shape[0]
        return weights, torch.arange(chosen.numel(), device=x.device).remainder(experts).view_as(chosen)


@frozen(kw_only=True)
class Balanced(SoftmaxTopK):
    """`softmax_topk` whose choice is not followed."""

    def build(self, context, dim, experts):
        return BalancedRouter(self, context, dim, experts)
