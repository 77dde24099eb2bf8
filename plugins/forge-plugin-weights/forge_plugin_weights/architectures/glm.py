"""GLM-4, and GLM-4.5 to GLM-4.7, whose experts a sigmoid chooses as DeepSeek-V3's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import frozen

from forge_plugin_weights.architectures.deepseek import (
    TRAINING_ONLY,
    Predictions,
    layer_rules,
    moe_fields,
    with_predictions,
)
from forge_plugin_weights.architectures.dense import (
    ATTENTION,
    ENDS,
    QK_NORM,
    QKV_BIASES,
    attention_fields,
    dense_fields,
    named_alike,
    renamed,
    rotated_in_pairs,
    shape_fields,
    tied_head,
)
from forge_plugin_weights.architectures.dense import NORMS as NORMS_BEFORE
from forge_plugin_weights.fields import Choice, Fixed, Key, Rope
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule
from forge_plugin_weights.rules import Rows

LAYER = "model.layers.{layer}"
NORMS = renamed(
    {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_post_norm": "post_mlp_layernorm",
    }
)
QK_EPS = "attention.qk_norm_eps"


@frozen
class NormEps(Key):
    """`rms_norm_eps` of all norms, where a key specifies whether there are norms of queries and keys."""

    def write(self, model: Flat) -> Config:
        """Leaves out the value of those norms if the model has none: it is the default then."""
        normed = model.get("attention.qk_norm")
        return super().write(model if normed else {path: value for path, value in model.items() if path != QK_EPS})


@frozen(kw_only=True)
class Glm4Moe(ArchitectureComponent):
    """GLM-4.5, GLM-4.5-Air, GLM-4.6 and GLM-4.7: half of each head is rotated."""

    name = "Glm4MoeForCausalLM"
    harmless = ("output_router_logits",)
    training_only = TRAINING_ONLY

    def fields(self) -> Sequence[Field]:
        """Returns the keys; the output projection of attention never has a bias."""
        norms: dict[bool, Flat] = {value: {"attention.qk_norm": value} for value in (False, True)}
        return (
            *shape_fields(),
            *attention_fields(kv_heads=8, rope=Rope(share=0.5)),
            Choice("attention_bias", QKV_BIASES, False),
            Choice("use_qk_norm", norms, False),
            *moe_fields(first_dense=1, scaling=1.0, groups=1, top_groups=1),
            Fixed({"ffn.every": 1}),
            NormEps("rms_norm_eps", ("norm.eps", QK_EPS), 1e-5),
            Predictions(),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; a block of multi-token prediction is a further layer there, behind the others."""
        return with_predictions(model, layer_rules([*ATTENTION, *QK_NORM]))


@frozen(kw_only=True)
class Glm(ArchitectureComponent):
    """GLM-4-9B and GLM-Edge in the form of `transformers`: half of each head is rotated."""

    name = "GlmForCausalLM"
    seldom = True
    placement: ClassVar[str] = "pre"
    """`norm_placement` of ours."""
    norms: ClassVar[Sequence[Rule]] = NORMS_BEFORE

    def fields(self) -> Sequence[Field]:
        """Returns the keys; the output projection of attention never has a bias."""
        placement = Fixed({"norm_placement": self.placement, "attention.qk_norm": False, "ffn.bias": False})
        attention = attention_fields(head_dim=128, kv_heads=2, rope=Rope(share=0.5))
        # An unusual number, and the default of `GlmConfig`
        return dense_fields(attention, placement, Choice("attention_bias", QKV_BIASES, True), eps=1.5625e-7)

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; neighbours are rotated together there, and gate and up projection are one matrix."""
        width = model["attention.head_dim"]
        rotated = int(width * model["attention.rope.partial_rotary_factor"])
        gates = [f"layers.{{layer}}.ffn.{ours}.weight" for ours in ("gate", "up")]
        return (
            *ENDS,
            *self.norms,
            *rotated_in_pairs(width, rotated),
            *named_alike("attention.v", "attention.o", "ffn.down"),
            Rows(gates, f"{LAYER}.mlp.gate_up_proj.weight"),
            *tied_head(model),
        )


@frozen(kw_only=True)
class Glm4(Glm):
    """GLM-4-0414 and GLM-Z1, 9B and 32B: norms before and after each part."""

    name = "Glm4ForCausalLM"
    seldom = False
    placement = "both"
    norms = NORMS
