"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without positions in the rest, and experts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

from forge_plugin_transformer.layer_parts import default_hidden
from forge_plugin_weights.architectures.deepseek import LATENT_ATTENTION, TRAINING_ONLY, DenseLayers, ValueWidth
from forge_plugin_weights.architectures.dense import ENDS, FFN, NORMS, TRANSFORMER, shape_fields
from forge_plugin_weights.architectures.experts import MATRICES, MIXTRAL, MOE, expert_rules
from forge_plugin_weights.architectures.qwen3_next import LINEAR, TYPE, MixedLayers, in_layer
from forge_plugin_weights.fields import Choice, Dropout, Fixed, Irrelevant, Key, Only, OrNone
from forge_plugin_weights.keys_by_layer import NO_ROPE, of_layers
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule, Unsupported
from forge_plugin_weights.layer_fields import FULL, depth
from forge_plugin_weights.rules import Alone, FilterRows, Same

KDA = "forge-plugin-linear-attention/kda"
TABLE = "linear_attn_config"
"""The table of published files, in place of keys that `transformers` writes."""
OF_TABLE: Mapping[str, str] = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Its keys, and keys of `transformers` for the same."""
FULL_LAYERS, KDA_LAYERS = "full_attn_layers", "kda_layers"
NORM_EPS = "rms_norm_eps"
OURS, THEIRS = "layers.{layer}.attention", "model.layers.{layer}.self_attn"
PROJECTIONS: Mapping[str, str] = {
    **{name: f"{name}_proj" for name in "qkvo"},
    "step_down": "f_a_proj",
    "step_up": "f_b_proj",
    "gate_down": "g_a_proj",
    "gate_up": "g_b_proj",
    "beta": "b_proj",
    "norm": "o_norm",
}
"""Modules of a layer with Kimi Delta Attention, by our names."""


def fourth_layers(config: Config) -> Sequence[bool]:
    """Returns which layers have latent attention without `layer_types`: by the table, or layers 4, 8, ... from 0."""
    table, layers = config.get(TABLE) or {}, depth(config)
    if FULL_LAYERS not in table or KDA_LAYERS not in table:
        return [layer > 0 and layer % 4 == 0 for layer in range(layers)]
    full, delta = set(table[FULL_LAYERS]), set(table[KDA_LAYERS])
    if full & delta or full | delta != {*range(1, layers + 1)}:
        raise Unsupported(f"{TABLE} does not name each of layers 1 to {layers} once, in {FULL_LAYERS} or {KDA_LAYERS}")
    return [layer in full for layer in range(1, layers + 1)]


@frozen(kw_only=True)
class KimiLayers(MixedLayers):
    """Layers of both kinds, by the table of published files or by the keys of `transformers`."""

    @property
    def keys(self) -> Collection[str]:
        return (*super().keys, TABLE)

    def read(self, config: Config) -> Flat:
        """Reads the table as the keys of `transformers`, over which it has precedence."""
        table: Mapping[str, Any] = config.get(TABLE) or {}
        if unknown := [key for key in table if key not in {*OF_TABLE, FULL_LAYERS, KDA_LAYERS}]:
            raise Unsupported(f"{TABLE} with {', '.join(unknown)}, which Forge does not know")
        return super().read({**config, **{OF_TABLE[key]: table[key] for key in OF_TABLE if key in table}})

    def write(self, model: Flat) -> Config:
        """Writes both forms: code of the publisher reads the table alone."""
        config = super().write(model)
        numbers: dict[str, list[int]] = {FULL: [], LINEAR: []}
        for number, entry in enumerate(config["layer_types"], 1):
            numbers[entry].append(number)
        if not numbers[LINEAR]:
            return config
        sizes = {key: config[theirs] for key, theirs in OF_TABLE.items()}
        return {**config, TABLE: {FULL_LAYERS: numbers[FULL], KDA_LAYERS: numbers[LINEAR], **sizes}}


@frozen(kw_only=True)
class KimiLinear(ArchitectureComponent):
    """Kimi-Linear-48B-A3B (Kimi Team 2025, arXiv 2510.26692)."""

    name = "KimiLinearForCausalLM"
    # No layer encodes positions. The rest names implementations, or is derived.
    harmless = (
        *(
            "rope_theta",
            "rope_scaling",
            "rope_parameters",
            "model_max_length",
            "num_key_value_heads",
            "head_dim",
            "qk_head_dim",
        ),
        *("pretraining_tp", "output_router_logits", "use_grouped_topk"),
    )
    kept = ("model_max_length",)
    training_only = (*TRAINING_ONLY, "attention.chunk")
    # Version 5 of transformers writes dense layers under the name of experts
    renames: ClassVar[Mapping[str, str]] = {r"\.block_sparse_moe\.(gate|up|down)_proj\.": r".mlp.\1_proj."}

    def fields(self) -> Sequence[Field]:
        """Returns the keys of both kinds of attention, and of experts that a sigmoid chooses."""
        full = (
            Irrelevant("attention.rope_interleave", False, {"attention.rope.type": NO_ROPE}),
            Fixed(
                {
                    TYPE: "forge-plugin-mla/mla",
                    "attention.rope.type": NO_ROPE,
                    "attention.rope_interleave": False,
                    "attention.norm_eps": 1e-6,  # the norm of latents ignores `rms_norm_eps`
                }
            ),
            Key("num_attention_heads", "attention.heads", 32),
            OrNone("q_lora_rank", "attention.q_lora_rank"),
            Key("kv_lora_rank", "attention.kv_lora_rank", 512),
            Key("qk_nope_head_dim", "attention.qk_nope_head_dim", 128),
            Key("qk_rope_head_dim", "attention.qk_rope_head_dim", 64),
            ValueWidth("v_head_dim", "attention.v_head_dim", 128, key_widths=(128, 64)),
        )
        linear = (
            Key("linear_num_heads", "attention.heads", 32),
            Key("linear_head_dim", ("attention.head_dim", "attention.value_dim", "attention.rank"), 128, width_of_head),
            Key("linear_conv_kernel_dim", "attention.conv", 4),
            Key(NORM_EPS, "attention.norm_eps", 1e-5),
            Fixed({TYPE: KDA}),
        )
        return (
            *(field for field in shape_fields() if "tie_word_embeddings" not in field.keys),
            Only("tie_word_embeddings", False, "its class ties no head"),
            Fixed({"tie_embeddings": False}),
            Key(NORM_EPS, "norm.eps", 1e-5),
            KimiLayers(full=full, linear=linear, component=KDA, rule=fourth_layers, further=()),
            Only("mla_use_nope", True, "latent attention has no positions"),
            Only("attention_bias", False, "mla has no biases"),
            Dropout("attention_dropout"),
            *experts_fields(),
            Only("num_nextn_predict_layers", 0, "there are no blocks of multi-token prediction", write_it=False),
        )

    def repeated(self, config: Config) -> Config:
        return {"num_key_value_heads": config["num_attention_heads"]}

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules of published files, whose layers with experts have another name than dense ones."""
        layer = "model.layers.{layer}.block_sparse_moe"
        attention = [
            in_layer(rule, number)
            for number, own in enumerate(of_layers(model))
            for rule in (DELTA_RULES if own[TYPE] == KDA else LATENT_ATTENTION)
        ]
        shared = (
            Same(f"layers.{{layer}}.ffn.shared.{ours}.weight", f"{layer}.shared_experts.{theirs}.weight")
            for ours, theirs in MATRICES.items()
        )
        router = (
            Same("layers.{layer}.ffn.router.weight", f"{layer}.gate.weight"),
            Same("layers.{layer}.ffn.router.bias", f"{layer}.gate.e_score_correction_bias"),
        )
        return (*ENDS, *NORMS, *attention, *FFN, *expert_rules(layer, MIXTRAL), *shared, *router)


def width_of_head(model: Flat) -> int:
    """Returns the width of a head that our 0 stands for: in a layer of Kimi Delta Attention, one for all of it."""
    return int(model["attention.head_dim"] or model["dim"] // model["attention.heads"])


def experts_fields() -> Sequence[Field]:
    """Returns the keys of feed-forward parts: as DeepSeek-V3's, under other names."""
    return (
        Choice("hidden_act", {"silu": {"ffn.type": f"{MOE}/moe"}}, "silu", "experts are gated by silu"),
        Fixed({"ffn.dense.type": f"{TRANSFORMER}/swiglu", "ffn.router.type": f"{MOE}/sigmoid_topk", "ffn.every": 1}),
        Key("intermediate_size", "ffn.dense.hidden", derived=lambda model: default_hidden(model["dim"])),
        Key("moe_intermediate_size", "ffn.hidden", derived=lambda model: default_hidden(model["dim"])),
        Key("num_experts", "ffn.experts", 256),
        Key("num_shared_experts", "ffn.shared_experts", 1),
        DenseLayers(),
        Only("moe_layer_freq", 1, "all layers behind the dense ones have experts", write_it=False),
        Key("num_experts_per_token", "ffn.router.top_k", 8),
        Key("routed_scaling_factor", "ffn.router.scaling", 2.446),
        Key("num_expert_group", "ffn.router.groups", 1),
        Key("topk_group", "ffn.router.top_groups", 1),
        Key("moe_renormalize", "ffn.router.normalise", True, null=False),
        Only("moe_router_activation_func", "sigmoid", "the router is sigmoid_topk", write_it=False),
    )


DELTA_RULES: Sequence[Rule] = (
    *(Same(f"{OURS}.{ours}.weight", f"{THEIRS}.{theirs}.weight") for ours, theirs in PROJECTIONS.items()),
    *(FilterRows([f"{OURS}.{name}_conv.weight"], f"{THEIRS}.{name}_conv1d.weight") for name in "qkv"),
    Same(f"{OURS}.offset.weight", f"{THEIRS}.dt_bias"),
    Alone(f"{OURS}.log_rate.weight", f"{THEIRS}.A_log"),
)
