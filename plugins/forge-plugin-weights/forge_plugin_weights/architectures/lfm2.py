"""LFM2 and LFM2.5, dense and with experts: gated short convolutions in most layers, attention in the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from attrs import frozen

from forge_plugin_transformer.layer_parts import default_hidden
from forge_plugin_weights.architectures.deepseek import TRAINING_ONLY
from forge_plugin_weights.architectures.dense import TRANSFORMER, attention_fields, shape_fields, tied_head
from forge_plugin_weights.architectures.experts import MIXTRAL, MOE, expert_rules
from forge_plugin_weights.architectures.qwen3_next import TYPE, MixedLayers, in_layer
from forge_plugin_weights.fields import REQUIRED, Dropout, Fixed, Irrelevant, Key, Only, setting, value_of
from forge_plugin_weights.keys_by_layer import of_layers
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule, Unsupported
from forge_plugin_weights.layer_fields import depth
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
    """Returns which layers have attention where there is no `layer_types`: all, unless a list names some."""
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
    harmless: ClassVar[Collection[str]] = (
        *("block_dim", "block_norm_eps", "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init"),
        *("conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads"),
    )

    def fields(self) -> Sequence[Field]:
        """Returns the keys of layers of both kinds, and of a dense feed-forward part in each."""
        return *self.shared(), Fixed({"ffn.type": f"{TRANSFORMER}/swiglu"}), AdjustedWidth()

    def shared(self) -> Sequence[Field]:
        """Returns the keys that models with experts have, too; queries and keys of layers with attention have norms."""
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
        )

    def repeated(self, config: Config) -> Config:
        return {"block_dim": config["hidden_size"], "conv_dim": config["hidden_size"]}

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


@frozen(kw_only=True)
class Lfm2Moe(Lfm2):
    """LFM2-8B-A1B and LFM2.5 of that size: experts that a sigmoid chooses behind some dense layers."""

    name = "Lfm2MoeForCausalLM"
    harmless = (*Lfm2.harmless, "output_router_logits")
    training_only = TRAINING_ONLY

    def fields(self) -> Sequence[Field]:
        """Returns the keys of layers of both kinds, and of experts."""
        return (
            *self.shared(),
            Fixed({"ffn.type": f"{MOE}/moe", "ffn.dense.type": f"{TRANSFORMER}/swiglu", "ffn.every": 1}),
            Fixed({"ffn.router.type": f"{MOE}/sigmoid_topk"}),
            Irrelevant("ffn.router.normalise_eps", 1e-6, {"ffn.router.normalise": False}),
            Fixed({"ffn.router.normalise_eps": 1e-6}),
            Key(WIDTH, "ffn.dense.hidden", 7168, lambda model: default_hidden(model["dim"])),
            Key("moe_intermediate_size", "ffn.hidden", 1792, lambda model: default_hidden(model["dim"])),
            Key("num_experts", "ffn.experts", 32),
            Key("num_experts_per_tok", "ffn.router.top_k", 4),
            Key("num_dense_layers", "ffn.first_dense", 2),
            Key("routed_scaling_factor", "ffn.router.scaling", 1.0),
            Key("norm_topk_prob", "ffn.router.normalise", True),
            Only("use_expert_bias", True, "the router is sigmoid_topk, which has biases"),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules, with experts under Mixtral's names."""
        layer = "model.layers.{layer}.feed_forward"
        router = (
            Same("layers.{layer}.ffn.router.weight", f"{layer}.gate.weight"),
            Same("layers.{layer}.ffn.router.bias", f"{layer}.expert_bias"),
        )
        return (*super().rules(model), *router, *expert_rules(layer, MIXTRAL))


OURS, THEIRS = "layers.{layer}.attention", "model.layers.{layer}"
CONVOLUTION_RULES: Sequence[Rule] = (
    Rows([f"{OURS}.{name}.weight" for name in "bcv"], f"{THEIRS}.conv.in_proj.weight"),
    FilterRows([f"{OURS}.filters.weight"], f"{THEIRS}.conv.conv.weight"),
    Same(f"{OURS}.o.weight", f"{THEIRS}.conv.out_proj.weight"),
)
ATTENTION_RULES: Sequence[Rule] = [
    Same(f"{OURS}.{ours}.weight", f"{THEIRS}.{theirs}.weight") for ours, theirs in ATTENTION.items()
]
