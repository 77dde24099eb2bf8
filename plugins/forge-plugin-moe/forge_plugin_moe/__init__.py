"""Mixture of experts: type `moe` of kind `ffn`, and types `softmax_topk`, `sigmoid_topk`, `expert_choice` and `hash` of
kind `router`."""

from forge_plugin_moe.moe import ExpertChoice, Hash, MoE, SigmoidTopK, SoftmaxTopK

__all__ = ["ExpertChoice", "Hash", "MoE", "SigmoidTopK", "SoftmaxTopK"]
