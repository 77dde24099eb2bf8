"""Mixture of experts: the FFN `moe`, and the routers `softmax_topk`, `sigmoid_topk`, `expert_choice` and `hash`."""

from forge_plugin_moe.moe import ExpertChoice, Hash, MoE, SigmoidTopK, SoftmaxTopK

__all__ = ["ExpertChoice", "Hash", "MoE", "SigmoidTopK", "SoftmaxTopK"]
