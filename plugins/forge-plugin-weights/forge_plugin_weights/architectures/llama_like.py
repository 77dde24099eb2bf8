"""Granite, SmolLM3, Ministral, Seed-OSS and StarCoder2: Llamas but for a key or two."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attrs import frozen

from forge_plugin_weights.architectures.dense import (
    ENDS_WITH_BIAS,
    PLAIN,
    Dense,
    all_biases,
    attention_fields,
    dense_fields,
    renamed,
    shape_fields,
)
from forge_plugin_weights.architectures.gpt import gelu
from forge_plugin_weights.fields import Choice, Converted, Dropout, Fixed, Key, Rope
from forge_plugin_weights.kinds import Config, Field, Flat, Unsupported
from forge_plugin_weights.layer_fields import LayerWindows, RopeOfSomeLayers, Window, depth


def granite_factors() -> Sequence[Field]:
    """Returns the keys of factors on embeddings, scores, logits, and on what each part adds."""
    return (
        Key(
            "attention_multiplier",
            "attention.scale",
            1.0,
            null=0.0,  # that of most models
            derived=lambda model: model["attention.head_dim"] ** -0.5,
        ),
        Key("embedding_multiplier", "embedding_scale", 1.0),
        Key("residual_multiplier", "residual_scale", 1.0),
        # A divisor there, a factor here
        Converted("logits_scaling", "logit_scale", lambda divisor: 1 / divisor, lambda factor: 1 / factor, 1.0),
    )


@frozen(kw_only=True)
class Granite(Dense):
    """Granite 3: factors on embeddings, scores, logits, and on what each part adds."""

    name = "GraniteForCausalLM"

    def fields(self) -> Sequence[Field]:
        biases = (all_biases(), Key("mlp_bias", "ffn.bias", False))
        return dense_fields(attention_fields(), *biases, *granite_factors())


@frozen(kw_only=True)
class SmolLM3(Dense):
    """SmolLM3: every fourth layer has no encoding of positions."""

    name = "SmolLM3ForCausalLM"
    harmless = ("pretraining_tp", "max_window_layers")

    def fields(self) -> Sequence[Field]:
        """Returns the keys; windows, if they are switched on, are in the layers without positions."""
        rope = RopeOfSomeLayers(theta=2e6)
        return dense_fields(
            attention_fields(kv_heads=4, rope=rope),
            all_biases(),
            LayerWindows(switched=True, rule=lambda config: [not encoded for encoded in rope.layers(config)]),
            Key("mlp_bias", "ffn.bias", False),
            tied=True,
        )


@frozen(kw_only=True)
class Ministral(Dense):
    """Ministral 8B: a list has the layers with the window; without it, all have."""

    name = "MinistralForCausalLM"
    seldom = True

    def fields(self) -> Sequence[Field]:
        windows = LayerWindows(default=4096, rule=lambda config: [True] * depth(config))
        return dense_fields(attention_fields(kv_heads=8), windows, PLAIN)


@frozen
class SeparateBiases(Field):
    """`attention_bias` of queries, keys and values, and `attention_out_bias` of the output projection."""

    @property
    def keys(self) -> Collection[str]:
        return ("attention_bias", "attention_out_bias")

    def read(self, config: Config) -> Flat:
        """Raises `Unsupported` for an output projection that is the only one with a bias."""
        inner, outer = config.get("attention_bias", True), config.get("attention_out_bias", False)
        if outer and not inner:
            raise Unsupported("attention_out_bias = True without attention_bias; Forge has no such bias alone")
        return {"attention.bias": inner, **({"attention.output_bias": outer} if inner else {})}

    def write(self, model: Flat) -> Config:
        """Writes both keys."""
        bias = bool(model.get("attention.bias"))
        return {"attention_bias": bias, "attention_out_bias": bias and bool(model.get("attention.output_bias"))}


@frozen(kw_only=True)
class SeedOss(Dense):
    """Seed-OSS 36B: biases of queries, keys and values."""

    name = "SeedOssForCausalLM"
    seldom = True
    harmless = ("pretraining_tp",)

    def fields(self) -> Sequence[Field]:
        return dense_fields(
            attention_fields(head_dim=128, kv_heads=8),
            Fixed({"attention.qk_norm": False}),
            SeparateBiases(),
            Dropout("residual_dropout"),
            Key("mlp_bias", "ffn.bias", False),
        )


@frozen(kw_only=True)
class Starcoder2(Dense):
    """StarCoder2 3B, 7B and 15B: layer norms, and a feed-forward part of two matrices."""

    name = "Starcoder2ForCausalLM"
    ends = ENDS_WITH_BIAS
    ffn = renamed({"ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj"})
    # They describe what the class always has, or repeat another key.
    harmless = (
        *("activation_function", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "scale_attn_weights"),
        *("layer_norm_epsilon", "mlp_type", "norm_type", "rms_norm_eps"),
    )

    def fields(self) -> Sequence[Field]:
        """Returns the keys; one specifies all biases except in norms, which are always there."""
        biases: dict[bool, Flat] = {
            False: {"attention.bias": False, "ffn.bias": False},
            True: {"attention.bias": True, "attention.output_bias": True, "ffn.bias": True},
        }
        return (
            *shape_fields(tied=True, norm="layernorm"),
            *attention_fields(kv_heads=2, rope=Rope()),
            Fixed({"attention.qk_norm": False}),
            Choice("use_bias", biases, True),
            gelu("hidden_act", "gelu_pytorch_tanh", bias=None),
            Key("intermediate_size", "ffn.hidden", derived=lambda model: 4 * model["dim"]),
            Window(),
            *(Dropout(key) for key in ("residual_dropout", "embedding_dropout")),
            Key("norm_epsilon", "norm.eps", 1e-5),
        )
