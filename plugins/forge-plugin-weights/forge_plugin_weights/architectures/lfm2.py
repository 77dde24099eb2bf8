"""LFM2 and LFM2.5: gated short convolutions in most layers, grouped-query attention in the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from attrs import frozen

from forge_plugin_weights.architectures.dense import TRANSFORMER, attention_fields, shape_fields, tied_head
from forge_plugin_weights.architectures.qwen3_next import TYPE, MixedLayers, in_layer
from forge_plugin_weights.fields import REQUIRED, Dropout, Fixed, Key, Only, setting, value_of
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule, Unsupported
from forge_plugin_weights.layer_fields import depth
from forge_plugin_weights.layered import of_layers
from forge_plugin_weights.rules import FilterRows, Rows, Same

CONV = "forge-plugin-linear-attention/short_conv"
ATTENTION_LAYERS = "full_attn_idxs"
WIDTH, OLD_WIDTH = "intermediate_size", "block_ff_dim"
ADJUSTED, FACTOR, MULTIPLE = "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"
ENDS: Mapping[str, str] = {
    "embedding": "model.embed_tokens",
    "norm": "model.embedding_norm",
    "head": "lm_head",
}
LAYER: Mapping[str, str] = {
    "attention_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "ffn.gate": "feed_forward.w1",
    "ffn.up": "feed_forward.w3",
    "ffn.down": "feed_forward.w2",
}
ATTENTION: Mapping[str, str] = {
    **{name: f"self_attn.{name}_proj" for name in "qkv"},
    "o": "self_attn.out_proj",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
}
"""Modules by our names."""


def listed_layers(config: Config) -> Sequence[bool]:
    """Returns which layers have attention where there is no `layer_types`: those of a list, or all."""
    chosen = config.get(ATTENTION_LAYERS)
    layers = range(depth(config))
    if chosen is not None and (unknown := [index for index in chosen if index not in layers]):
        raise Unsupported(f"{ATTENTION_LAYERS} has {unknown[0]}, where there are {depth(config)} layers")
    return [chosen is None or layer in chosen for layer in layers]


@frozen
class AdjustedWidth(Field):
    """The width of the feed-forward part: two thirds of a key, rounded up, unless another one switches this off."""

    @property
    def keys(self) -> Collection[str]:
        return (WIDTH, OLD_WIDTH, ADJUSTED, FACTOR, MULTIPLE)

    @property
    def written(self) -> Collection[str]:
        """The width itself, and that nothing is adjusted."""
        return (WIDTH, OLD_WIDTH, ADJUSTED)

    def read(self, config: Config) -> Flat:
        """Computes the width as `Lfm2MLP` does; the older key has precedence."""
        width = int(value_of(config, OLD_WIDTH, None) or value_of(config, WIDTH, REQUIRED))
        if value_of(config, ADJUSTED, True):
            factor, multiple = value_of(config, FACTOR, 1.0), value_of(config, MULTIPLE, 256)
            width = int(factor * int(2 * width / 3))
            width = -(-width // multiple) * multiple
        return {"ffn.hidden": width}

    def write(self, model: Flat) -> Config:
        """Writes the width under both names, as `transformers` prefers the older one."""
        width = setting(model, "ffn.hidden")
        return {WIDTH: width, OLD_WIDTH: width, ADJUSTED: False}


@frozen(kw_only=True)
class Lfm2(ArchitectureComponent):
    """LFM2 and LFM2.5 (Liquid AI 2025), 350M to 2.6B, without experts."""

    name = "Lfm2ForCausalLM"
    # Notes on how the model was initialised, and sizes that transformers takes from other keys
    harmless = (
        *("block_dim", "block_norm_eps", "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init"),
        *("conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads"),
    )

    def fields(self) -> Sequence[Field]:
        """Returns the keys; queries and keys of layers with attention have norms."""
        gqa = attention_fields(theta=1e6, kv_heads=8)
        full = (
            *(field for field in gqa if not isinstance(field, Dropout)),
            Fixed({"attention.qk_norm": True, "attention.bias": False}),
            Key("norm_eps", "attention.qk_norm_eps", 1e-5),
        )
        return (
            *(field for field in shape_fields() if "tie_word_embeddings" not in field.keys),
            Key("tie_word_embeddings", "tie_embeddings", True, other_names=("tie_embedding",)),
            Key("norm_eps", "norm.eps", 1e-5),
            MixedLayers(
                full=full,
                linear=(Fixed({TYPE: CONV}), Key("conv_L_cache", "attention.conv", 3)),
                component=CONV,
                entry="conv",
                rule=listed_layers,
                further=(ATTENTION_LAYERS,),
            ),
            Only("conv_bias", False, "short_conv has no biases"),
            Only("use_pos_enc", True, "layers with attention encode positions", write_it=False),
            Only("block_use_swiglu", True, "feed-forward parts are gated", write_it=False),
            Fixed({"ffn.type": f"{TRANSFORMER}/swiglu"}),
            AdjustedWidth(),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules of layers of both kinds, each for its layers."""
        layer = "layers.{layer}"
        ends = (Same(f"{ours}.weight", f"{theirs}.weight") for ours, theirs in ENDS.items())
        parts = (Same(f"{layer}.{ours}.weight", f"model.{layer}.{theirs}.weight") for ours, theirs in LAYER.items())
        mixers = [
            in_layer(rule, number)
            for number, own in enumerate(of_layers(model))
            for rule in (CONVOLUTION_RULES if own[TYPE] == CONV else ATTENTION_RULES)
        ]
        return (*ends, *parts, *mixers, *tied_head(model))


OURS, THEIRS = "layers.{layer}.attention", "model.layers.{layer}"
CONVOLUTION_RULES: Sequence[Rule] = (
    Rows([f"{OURS}.{name}.weight" for name in "bcv"], f"{THEIRS}.conv.in_proj.weight"),
    FilterRows([f"{OURS}.filters.weight"], f"{THEIRS}.conv.conv.weight"),
    Same(f"{OURS}.o.weight", f"{THEIRS}.conv.out_proj.weight"),
)
ATTENTION_RULES: Sequence[Rule] = [
    Same(f"{OURS}.{ours}.weight", f"{THEIRS}.{theirs}.weight") for ours, theirs in ATTENTION.items()
]
