"""Granite and SmolLM3: Llamas but for a key or two."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from forge_plugin_weights.architectures.dense import (
    ATTENTION,
    ENDS,
    FFN,
    NORMS,
    all_biases,
    attention_fields,
    shape_fields,
    swiglu_fields,
    tied_head,
)
from forge_plugin_weights.fields import Converted, Key
from forge_plugin_weights.kinds import ArchitectureComponent, Field, Flat, Rule
from forge_plugin_weights.layer_fields import LayerWindows, RopeOfSomeLayers


@frozen(kw_only=True)
class Granite(ArchitectureComponent):
    """Granite 3: factors on embeddings, scores, logits, and on what each part adds."""

    name = "GraniteForCausalLM"

    def fields(self) -> Sequence[Field]:
        return (
            *shape_fields(),
            *attention_fields(),
            all_biases(),
            Key(
                "attention_multiplier",
                "attention.scale",
                1.0,
                derived=lambda model: model["attention.head_dim"] ** -0.5,
            ),
            Key("embedding_multiplier", "embedding_scale", 1.0),
            Key("residual_multiplier", "residual_scale", 1.0),
            # A divisor there, a factor here
            Converted("logits_scaling", "logit_scale", lambda divisor: 1 / divisor, lambda factor: 1 / factor, 1.0),
            Key("mlp_bias", "ffn.bias", False),
            *swiglu_fields(),
            Key("rms_norm_eps", "norm.eps", 1e-6),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        return (*ENDS, *NORMS, *ATTENTION, *FFN, *tied_head(model))


@frozen(kw_only=True)
class SmolLM3(ArchitectureComponent):
    """SmolLM3: every fourth layer has no encoding of positions."""

    name = "SmolLM3ForCausalLM"
    harmless = ("pretraining_tp", "max_window_layers")

    def fields(self) -> Sequence[Field]:
        """Returns the keys; windows, if they are switched on, are in the layers without positions."""
        rope = RopeOfSomeLayers(theta=2e6)
        return (
            *shape_fields(tied=True),
            *attention_fields(kv_heads=4, rope=rope),
            all_biases(),
            LayerWindows(switched=True, rule=lambda config: [not encoded for encoded in rope.layers(config)]),
            Key("mlp_bias", "ffn.bias", False),
            *swiglu_fields(),
            Key("rms_norm_eps", "norm.eps", 1e-6),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        return (*ENDS, *NORMS, *ATTENTION, *FFN, *tied_head(model))
