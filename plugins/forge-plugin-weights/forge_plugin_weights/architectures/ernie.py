"""ERNIE 4.5 with experts: attention as in ERNIE 4.5 without, and experts that a softmax and a bias choose."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attrs import frozen

from forge_plugin_transformer.layer_parts import default_hidden
from forge_plugin_weights.architectures.dense import TRANSFORMER, attention_fields, shape_fields
from forge_plugin_weights.architectures.experts import BALANCE, MATRICES, MOE, expert_rules
from forge_plugin_weights.architectures.interleaved import rules_of_neighbours
from forge_plugin_weights.fields import Choice, Dropout, Fixed, Key, Only, setting
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule, Unsupported
from forge_plugin_weights.layer_fields import depth
from forge_plugin_weights.rules import Alone, Same

FIRST, LAST, INTERVAL = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"
LAYER = "model.layers.{layer}.mlp"


@frozen
class ExpertLayers(Field):
    """The first and the last layer with experts."""

    @property
    def keys(self) -> Collection[str]:
        return (FIRST, LAST)

    def read(self, config: Config) -> Flat:
        """Reads the first; raises `Unsupported` if a layer behind the last one has none."""
        layers = depth(config)
        if (last := config.get(LAST, -1)) not in (-1, layers - 1):
            raise Unsupported(f"{LAST} = {last}; all {layers} layers from the first one with experts on have some")
        return {"ffn.first_dense": min(config.get(FIRST, 1), layers)}

    def write(self, model: Flat) -> Config:
        layers = setting(model, "layers")
        return {FIRST: min(setting(model, "ffn.first_dense"), layers), LAST: layers - 1}

    def resolve(self, model: Flat) -> Flat:
        """Returns the number of layers where more are to be dense."""
        first = model.get("ffn.first_dense", 0)
        return {"ffn.first_dense": model["layers"]} if first > model.get("layers", first) else {}


@frozen(kw_only=True)
class Ernie45Moe(ArchitectureComponent):
    """ERNIE 4.5 21B-A3B and 300B-A47B, without their block of multi-token prediction."""

    name = "Ernie4_5_MoeForCausalLM"
    # Blocks of multi-token prediction are left out; the rest concerns training, or names implementations.
    harmless = (
        *("num_nextn_predict_layers", "output_router_logits", "router_aux_loss_coef"),
        *("moe_capacity", "moe_use_aux_free"),
    )
    training_only = (*BALANCE, "ffn.router.bias_rate")
    left_out = (*ArchitectureComponent.left_out, "model.mtp_*")

    def fields(self) -> Sequence[Field]:
        """Returns the keys; the class has no dropout."""
        return (
            *shape_fields(tied=True),
            Fixed({"attention.qk_norm": False, "attention.bias": False, "ffn.dense.bias": False, "ffn.every": 1}),
            *(field for field in attention_fields(theta=5e5, kv_heads=4) if not isinstance(field, Dropout)),
            Only("use_bias", False, "experts have no biases"),
            Only("moe_norm_min", 1e-12, "weights are divided by their sum, which a larger bound would change"),
            Choice("hidden_act", {"silu": {"ffn.type": f"{MOE}/moe"}}, "silu", "experts are gated by silu"),
            Fixed({"ffn.dense.type": f"{TRANSFORMER}/swiglu", "ffn.router.type": f"{MOE}/sigmoid_topk"}),
            Fixed({"ffn.router.score_function": "softmax", "ffn.router.normalise": True}),
            Key("intermediate_size", "ffn.dense.hidden", derived=lambda model: default_hidden(model["dim"])),
            Key("moe_intermediate_size", "ffn.hidden", derived=lambda model: default_hidden(model["dim"])),
            Key("moe_num_experts", "ffn.experts", 64),
            Key("moe_num_shared_experts", "ffn.shared_experts", 2),
            Key("moe_k", "ffn.router.top_k", 6),
            ExpertLayers(),
            Only(INTERVAL, 1, "all layers from the first one with experts on have some"),
            Key("rms_norm_eps", "norm.eps", 1e-5),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; neighbours are rotated together there."""
        shared = [
            Same(f"layers.{{layer}}.ffn.shared.{ours}.weight", f"{LAYER}.shared_experts.{theirs}.weight")
            for ours, theirs in MATRICES.items()
        ]
        router: list[Rule] = [
            Same("layers.{layer}.ffn.router.weight", f"{LAYER}.gate.weight"),
            Alone("layers.{layer}.ffn.router.bias", f"{LAYER}.moe_statics.e_score_correction_bias", before=1, behind=0),
        ]
        return (*rules_of_neighbours(model), *expert_rules(LAYER), *shared, *router)
