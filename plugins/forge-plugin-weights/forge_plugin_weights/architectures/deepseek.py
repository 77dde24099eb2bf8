"""DeepSeek-V3, V3.1 and R1, Kimi-K2, Moonlight: latent attention, sigmoid routing, multi-token prediction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

from forge_plugin_transformer.huggingface_names import COPIES, PREDICTION
from forge_plugin_transformer.layer_parts import default_hidden
from forge_plugin_weights.architectures.dense import ENDS, FFN, NORMS, TRANSFORMER, shape_fields, tied_head
from forge_plugin_weights.architectures.experts import MATRICES, MOE, expert_rules
from forge_plugin_weights.fields import (
    REQUIRED,
    Choice,
    Dropout,
    ExportedAs,
    Fixed,
    Key,
    Only,
    OrNone,
    Rope,
    setting,
    value_of,
)
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule, Unsupported
from forge_plugin_weights.layer_fields import depth
from forge_plugin_weights.rules import Repeated, Same, Stack

ATTENTION: Mapping[str, str] = {
    "q": "q_proj",
    "q_down": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "o": "o_proj",
}
"""Modules of latent attention, by our names."""
LAYER = "model.layers.{layer}"
TRAINING_ONLY = ("ffn.router.*balance", "ffn.router.z_loss", "ffn.router.bias_rate", "ffn.capacity_factor", "mtp.*")
NOPE, ROTATED = "qk_nope_head_dim", "qk_rope_head_dim"
PREDICTED = "num_nextn_predict_layers"
FIRST_DENSE, MLP_TYPES = "first_k_dense_replace", "mlp_layer_types"
DENSE, SPARSE = "dense", "sparse"


LATENT_ATTENTION: Sequence[Rule] = [
    Same(f"layers.{{layer}}.attention.{ours}.{{tensor}}", f"{LAYER}.self_attn.{theirs}.{{tensor}}")
    for ours, theirs in ATTENTION.items()
]


def layer_rules(attention: Sequence[Rule] = LATENT_ATTENTION) -> Sequence[Rule]:
    """Returns the rules of a layer's parts, whose names begin with `layers.{layer}`."""
    shared = [
        Same(f"layers.{{layer}}.ffn.shared.{ours}.weight", f"{LAYER}.mlp.shared_experts.{theirs}.weight")
        for ours, theirs in MATRICES.items()
    ]
    router = [
        Same("layers.{layer}.ffn.router.weight", f"{LAYER}.mlp.gate.weight"),
        Same("layers.{layer}.ffn.router.bias", f"{LAYER}.mlp.gate.e_score_correction_bias"),
    ]
    return (*NORMS, *attention, *FFN, *expert_rules(f"{LAYER}.mlp"), *shared, *router)


def prediction_rules(block: int, number: int, of_layer: Sequence[Rule]) -> Sequence[Rule]:
    """Returns the rules of a block of multi-token prediction, which is layer `number` in their files.

    Args:
        block: its number among such blocks.
        number: its number there.
        of_layer: the rules of a layer, which such a block contains.
    """
    own = f"mtp.blocks.{block}"
    rules: list[Rule] = [
        Same(f"{own}.{ours}.weight", f"model.layers.{number}.{theirs}.weight") for ours, theirs in PREDICTION.items()
    ]
    for rule in of_layer:
        # Both kinds have two names and nothing else, so that `type(rule)(*names)` makes the rule of the block.
        assert isinstance(rule, Same | Stack)
        names = rule.ours.replace("layers.{layer}", own), rule.theirs.replace("{layer}", str(number))
        rules.append(type(rule)(*names))
    # Written, since the published files have embedding and head once more for each block.
    copies = (
        Repeated(f"{ours}.weight", f"model.layers.{number}.{theirs}.weight", written=True)
        for theirs, ours in COPIES.items()
    )
    return [*rules, *copies]


def with_predictions(model: Flat, of_layer: Sequence[Rule]) -> Sequence[Rule]:
    """Returns the rules of a model whose layers have the rules `of_layer`, blocks of multi-token prediction too."""
    layers = model["layers"]
    predicted = (prediction_rules(block, layers + block, of_layer) for block in range(model.get("mtp.depth", 0)))
    return (*ENDS, *of_layer, *(rule for block in predicted for rule in block), *tied_head(model))


@frozen
class Predictions(Field):
    """Modules of multi-token prediction: a table of ours that is there or not."""

    @property
    def keys(self) -> Collection[str]:
        return (PREDICTED,)

    def read(self, config: Config) -> Flat:
        """Reads 0, null and a missing key as no table `[model.mtp]`."""
        depth = config.get(PREDICTED) or 0
        return {"mtp.depth": depth} if depth else {}

    def write(self, model: Flat) -> Config:
        """Writes 0 for a model without the table: the class of `transformers` has one block by default."""
        return {PREDICTED: model.get("mtp.depth", 0)}


@frozen
class DenseLayers(Field):
    """How many layers at the beginning are dense: a number in published files, a list in `transformers`."""

    default: int = 1
    """The number where the configuration has neither."""

    @property
    def keys(self) -> Collection[str]:
        return (FIRST_DENSE, MLP_TYPES)

    def read(self, config: Config) -> Flat:
        """Reads the list, or else the number."""
        types = config.get(MLP_TYPES)
        if types is None:
            return {"ffn.first_dense": min(config.get(FIRST_DENSE, self.default), depth(config))}
        first = types.count(DENSE)
        if types != self._types(first, depth(config)):
            raise Unsupported(f"{MLP_TYPES} = {types}; dense layers come first, and there is an entry for each layer")
        return {"ffn.first_dense": first}

    def write(self, model: Flat) -> Config:
        first = min(setting(model, "ffn.first_dense"), setting(model, "layers"))
        return {FIRST_DENSE: first, MLP_TYPES: self._types(first, setting(model, "layers"))}

    def _types(self, first: int, layers: int) -> list[str]:
        return [DENSE] * first + [SPARSE] * (layers - first)

    def resolve(self, model: Flat) -> Flat:
        """Returns the number of layers where more are to be dense."""
        first = model.get("ffn.first_dense", 0)
        return {"ffn.first_dense": model["layers"]} if first > model.get("layers", first) else {}


@frozen
class ValueWidth(Key):
    """The width of values, at most the width of keys."""

    key_widths: Sequence[Any] = (REQUIRED, REQUIRED)
    """The defaults of both parts of a key."""

    def read(self, config: Config) -> Flat:
        """Reads the width; raises `Unsupported` for one that kernels do not take."""
        width = value_of(config, self.theirs, self.default)
        keys = sum(value_of(config, *part) for part in zip((NOPE, ROTATED), self.key_widths, strict=True))
        if width > keys:
            raise Unsupported(f"{self.theirs} = {width}; values as wide as keys work ({NOPE} + {ROTATED} = {keys})")
        return super().read(config)


@frozen(kw_only=True)
class DeepSeekV3(ArchitectureComponent):
    """DeepSeek-V3 (arXiv 2412.19437) and models of its architecture."""

    name = "DeepseekV3ForCausalLM"
    # The key/value heads of latent attention are its heads; the rest names implementations, or is derived.
    harmless: ClassVar[Collection[str]] = (
        *("num_key_value_heads", "pretraining_tp", "qk_head_dim", "head_dim", "ep_size", "output_router_logits"),
        *("aux_loss_alpha", "seq_aux"),
    )
    training_only: ClassVar[Collection[str]] = TRAINING_ONLY

    def fields(self) -> Sequence[Field]:
        """Returns the keys of latent attention, of experts and of multi-token prediction."""
        return (
            *shape_fields(),
            Fixed({"attention.type": "forge-plugin-mla/mla"}),
            Key("num_attention_heads", "attention.heads"),
            OrNone("q_lora_rank", "attention.q_lora_rank", 1536),  # null in Moonlight: one matrix of queries
            *(Key(name, f"attention.{name}") for name in ("kv_lora_rank", NOPE, ROTATED)),
            ValueWidth("v_head_dim", "attention.v_head_dim"),
            Key("rope_interleave", "attention.rope_interleave", True),
            Only("attention_bias", False, "mla has no biases"),
            Dropout("attention_dropout"),
            Rope(),
            *moe_fields(),
            Key("moe_layer_freq", "ffn.every", 1),
            Only("scoring_func", "sigmoid", "the router is sigmoid_topk"),
            Only("topk_method", "noaux_tc", "groups are chosen by their two largest scores"),
            Key("rms_norm_eps", "norm.eps", 1e-6),
            Fixed({"attention.norm_eps": 1e-6}),  # the norms of latents ignore `rms_norm_eps`
            Predictions(),
        )

    def repeated(self, config: Config) -> Config:
        return {"num_key_value_heads": config["num_attention_heads"]}

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; a block of multi-token prediction is a further layer there, behind the others."""
        return with_predictions(model, layer_rules())


@frozen(kw_only=True)
class KimiK2(DeepSeekV3):
    """Kimi-K2, a DeepSeek-V3 with a `model_type` that `transformers` needs the publisher's code for."""

    def fields(self) -> Sequence[Field]:
        """Adds a field that refuses exports: they are `deepseek_v3`, for which `transformers` has a class."""
        return (*super().fields(), ExportedAs("deepseek_v3", "transformers has no class for kimi_k2"))


def moe_fields(*, first_dense: int = 3, scaling: float = 2.5, groups: int = 8, top_groups: int = 4) -> Sequence[Field]:
    """Returns the keys of experts that a sigmoid chooses; the arguments are the defaults of keys."""
    return (
        Choice("hidden_act", {"silu": {"ffn.type": f"{MOE}/moe"}}, "silu", "experts are gated by silu"),
        Fixed({"ffn.dense.type": f"{TRANSFORMER}/swiglu", "ffn.router.type": f"{MOE}/sigmoid_topk"}),
        Key("intermediate_size", "ffn.dense.hidden", derived=lambda model: default_hidden(model["dim"])),
        Key("moe_intermediate_size", "ffn.hidden", derived=lambda model: default_hidden(model["dim"])),
        Key("n_routed_experts", "ffn.experts"),
        Key("n_shared_experts", "ffn.shared_experts", 1),
        Key("first_k_dense_replace", "ffn.first_dense", first_dense),
        Key("num_experts_per_tok", "ffn.router.top_k"),
        Key("routed_scaling_factor", "ffn.router.scaling", scaling),
        Key("n_group", "ffn.router.groups", groups),
        Key("topk_group", "ffn.router.top_groups", top_groups),
        Key("norm_topk_prob", "ffn.router.normalise", True),
    )
