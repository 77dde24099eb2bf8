"""gpt-oss: experts with biases and a bounded SwiGLU, attention with sinks, a window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from forge_plugin_transformer.layer_parts import default_hidden
from forge_plugin_weights.architectures.dense import (
    ATTENTION,
    ENDS,
    NORMS,
    all_biases,
    attention_fields,
    shape_fields,
    tied_head,
)
from forge_plugin_weights.architectures.experts import BALANCE, MOE
from forge_plugin_weights.fields import Choice, Fixed, Irrelevant, Key, Rope
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule, Unsupported
from forge_plugin_weights.layer_fields import LayerWindows, every_nth_is_full
from forge_plugin_weights.rules import Interleaved, Same, Transposed

SCALING: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""How positions are stretched where no key specifies it."""
LAYER, OURS = "model.layers.{layer}", "layers.{layer}"
ROUTER: Mapping[str, Any] = {"type": f"{MOE}/softmax_topk", "normalise": "after", "bias": True}
"""Keys of the router: weights are the softmax over the chosen experts."""
GATES = ("gate", "up")
"""Columns of `gate_up_proj`, in turns."""


@frozen
class Stretched(Rope):
    """The position encoding, which is YaRN where no key specifies it."""

    def read(self, config: Config) -> Flat:
        """Adds the YaRN of `GptOssConfig` where neither form is there."""
        # An empty table is as a missing one here.
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or SCALING
        return super().read({**config, "rope_scaling": SCALING} if scaling is SCALING else config)


@frozen
class Bound(Key):
    """A bound, which there is always: 0 has another meaning on our side."""

    def read(self, config: Config) -> Flat:
        """Raises `Unsupported` for a bound that is not above 0."""
        bounds = super().read(config)
        if min(bounds.values()) <= 0:
            raise Unsupported(f"{self.theirs} = {config[self.theirs]!r}; a bound above 0 works")
        return bounds

    def write(self, model: Flat) -> Config:
        """Raises `Unsupported` for 0: `GptOssExperts` bounds activations always."""
        config = super().write(model)
        if not all(config.values()):
            raise Unsupported(f"{self.ours} = {model[str(self.ours)]!r}, where it has a bound always")
        return config


@frozen(kw_only=True)
class GptOss(ArchitectureComponent):
    """gpt-oss-20b and gpt-oss-120b."""

    name = "GptOssForCausalLM"
    # The first two repeat num_experts_per_tok and the original length of the position encoding.
    harmless = ("experts_per_token", "initial_context_length", "output_router_logits", "router_aux_loss_coef")
    training_only = BALANCE

    def fields(self) -> Sequence[Field]:
        """Returns the keys; layers 0, 2, 4, … have a window where `layer_types` is missing."""
        return (
            *shape_fields(),
            *attention_fields(head_dim=64, kv_heads=8, rope=Stretched(theta=150000.0)),
            all_biases(default=True),
            Fixed({"attention.sinks": True}),
            LayerWindows(default=128, rule=every_nth_is_full(2)),
            Choice("hidden_act", {"silu": {"ffn.type": f"{MOE}/moe"}}, "silu", "experts are gated by silu"),
            Fixed({"ffn.bias": True, "ffn.swiglu_offset": 1.0}),  # gate * (up + 1) in `GptOssExperts`
            Key("swiglu_alpha", "ffn.swiglu_alpha", 1.702),
            Bound("swiglu_limit", "ffn.swiglu_limit", 7.0),
            Fixed({f"ffn.router.{key}": value for key, value in ROUTER.items()}),
            Key("num_local_experts", "ffn.experts", 128, other_names=("num_experts",)),
            Key("num_experts_per_tok", "ffn.router.top_k", 4),
            Key("intermediate_size", "ffn.hidden", 2880, derived=lambda model: default_hidden(model["dim"])),
            Irrelevant("ffn.dense.hidden", 0, {"ffn.first_dense": 0, "ffn.every": 1}),  # no layer is dense
            Key("rms_norm_eps", "norm.eps", 1e-5),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; gate and up projection are one tensor in turns, and experts' matrices are transposed."""
        sinks = Same(f"{OURS}.attention.sinks.weight", f"{LAYER}.self_attn.sinks")
        router = Same(f"{OURS}.ffn.router.{{tensor}}", f"{LAYER}.mlp.router.{{tensor}}")
        ours, theirs = f"{OURS}.ffn.experts", f"{LAYER}.mlp.experts"
        experts = (
            Interleaved([f"{ours}.{gate}.weight" for gate in GATES], f"{theirs}.gate_up_proj", transposed=True),
            Interleaved([f"{ours}.{gate}.bias" for gate in GATES], f"{theirs}.gate_up_proj_bias"),
            Transposed(f"{ours}.down.weight", f"{theirs}.down_proj"),
            Same(f"{ours}.down.bias", f"{theirs}.down_proj_bias"),
        )
        return (*ENDS, *NORMS, *ATTENTION, sinks, router, *experts, *tied_head(model))
