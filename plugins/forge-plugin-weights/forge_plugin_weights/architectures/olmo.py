"""OLMo 2 and OLMo 3: norms after attention and feed-forward part, and over all heads of queries and of keys."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from forge_plugin_weights.architectures.dense import (
    ATTENTION,
    ENDS,
    FFN,
    QK_NORM,
    all_biases,
    attention_fields,
    shape_fields,
    swiglu_fields,
    tied_head,
)
from forge_plugin_weights.fields import Fixed, Key, Rope
from forge_plugin_weights.kinds import ArchitectureComponent, Field, Flat, Rule
from forge_plugin_weights.layer_fields import LayerWindows, RopeByWindow, every_nth_is_full
from forge_plugin_weights.rules import Same

POST_NORMS: Sequence[Rule] = (
    Same("layers.{layer}.attention_post_norm.weight", "model.layers.{layer}.post_attention_layernorm.weight"),
    Same("layers.{layer}.ffn_post_norm.weight", "model.layers.{layer}.post_feedforward_layernorm.weight"),
)
WINDOWS = LayerWindows(default=4096, rule=every_nth_is_full(4))


def olmo_fields(rope: Field | None = None) -> Sequence[Field]:
    """Returns the keys of both; `rope` is the position encoding, where it differs between layers."""
    return (
        *shape_fields(),
        Fixed({"norm_placement": "post", "attention.qk_norm": "all"}),
        *attention_fields(rope=rope),
        all_biases(),
        *swiglu_fields(),
        Key("rms_norm_eps", ("norm.eps", "attention.qk_norm_eps"), 1e-5),
    )


@frozen(kw_only=True)
class Olmo2(ArchitectureComponent):
    """OLMo 2."""

    name = "Olmo2ForCausalLM"

    def fields(self) -> Sequence[Field]:
        return olmo_fields()

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Without the norms before attention and feed-forward part, which these models lack."""
        return (*ENDS, *POST_NORMS, *ATTENTION, *QK_NORM, *FFN, *tied_head(model))


@frozen(kw_only=True)
class Olmo3(ArchitectureComponent):
    """OLMo 3: three layers of four have a window, and an encoding of positions that is not stretched."""

    name = "Olmo3ForCausalLM"

    def fields(self) -> Sequence[Field]:
        # One base for both kinds of layers, of which those with a window are not stretched
        base = Rope(theta=500000.0)
        return (*olmo_fields(RopeByWindow(windows=WINDOWS, full=base, near=base, near_theta="rope_theta")), WINDOWS)

    def rules(self, model: Flat) -> Sequence[Rule]:
        return (*ENDS, *POST_NORMS, *ATTENTION, *QK_NORM, *FFN, *tied_head(model))
