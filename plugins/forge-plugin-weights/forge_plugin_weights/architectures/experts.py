"""Mixtral, Granite MoE, MiniMax-M2, OLMoE, Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from attrs import frozen

from forge_plugin_transformer.layer_parts import default_hidden
from forge_plugin_weights.architectures.dense import (
    ATTENTION,
    ENDS,
    FFN,
    NORMS,
    QK_NORM,
    QKV_BIASES,
    TRANSFORMER,
    all_biases,
    attention_fields,
    shape_fields,
    tied_head,
)
from forge_plugin_weights.architectures.llama_like import granite_factors
from forge_plugin_weights.fields import (
    REQUIRED,
    SHARE,
    Choice,
    Derived,
    Fixed,
    Follows,
    Irrelevant,
    Key,
    Only,
    Rope,
    setting,
    value_of,
)
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule, Unsupported
from forge_plugin_weights.layer_fields import LayerWindows, Window, depth
from forge_plugin_weights.rules import Same, Stack, StackedRows

MOE = "forge-plugin-moe"
MATRICES: Mapping[str, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIXTRAL: Mapping[str, str] = {"gate": "w1", "up": "w3", "down": "w2"}
"""Matrices of an expert: our name, Mixtral's."""
WIDTH = "shared_expert_intermediate_size"
HEAD_DIM = "attention.head_dim"
ROTARY_WIDTH = "rotary_dim"
BALANCE = ("ffn.router.*balance", "ffn.router.z_loss", "ffn.capacity_factor")
"""Losses of routers, and the capacity, which exist in training only."""


def expert_rules(layer: str, matrices: Mapping[str, str] = MATRICES) -> Sequence[Rule]:
    """Returns the rules of routed experts below the name of their layer's part."""
    return [
        Stack(f"layers.{{layer}}.ffn.experts.{ours}.weight", f"{layer}.experts.{{expert}}.{theirs}.weight")
        for ours, theirs in matrices.items()
    ]


def dense_layers() -> Sequence[Field]:
    """Returns the keys that say which layers have experts, as Qwen's have them."""
    return (
        Key("decoder_sparse_step", "ffn.every", 1),
        Only("mlp_only_layers", [], "every n-th layer may lack experts by decoder_sparse_step only"),
        Fixed({"ffn.dense.type": f"{TRANSFORMER}/swiglu"}),
        Key("intermediate_size", "ffn.dense.hidden", derived=lambda model: default_hidden(model["dim"])),
    )


def odd_windows(config: Config) -> Sequence[bool]:
    """Returns which layers of Qwen2-MoE have a window if no list specifies them: every other one below a number."""
    end = config.get("max_window_layers", 28)
    return [layer % 2 == 0 and layer < end for layer in range(depth(config))]


@frozen(kw_only=True)
class Mixtral(ArchitectureComponent):
    """Mixtral 8x7B and 8x22B: weights of the chosen experts add up to 1."""

    name = "MixtralForCausalLM"
    harmless = ("output_router_logits", "router_aux_loss_coef")
    training_only = BALANCE

    def fields(self) -> Sequence[Field]:
        """Returns the keys of experts in every layer, whose routing weights are normalised after the choice."""
        router = {"ffn.router.type": f"{MOE}/softmax_topk", "ffn.router.normalise": "after"}
        return (
            *shape_fields(),
            *attention_fields(theta=1e6, kv_heads=8),
            Choice("hidden_act", {"silu": {"ffn.type": f"{MOE}/moe"}}, "silu", "experts are gated by silu"),
            Fixed(router),
            Key("num_local_experts", "ffn.experts", 8),
            Key("num_experts_per_tok", "ffn.router.top_k", 2),
            Key("intermediate_size", "ffn.hidden", derived=lambda model: default_hidden(model["dim"])),
            Irrelevant("ffn.dense.hidden", 0, {"ffn.first_dense": 0, "ffn.every": 1}),  # no layer is dense
            Key("rms_norm_eps", "norm.eps", 1e-5),
            Window(),
            Only("router_jitter_noise", 0.0, "routers add no noise of this kind"),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; the matrices of an expert are numbered there."""
        layer = "model.layers.{layer}.block_sparse_moe"
        router = Same("layers.{layer}.ffn.router.weight", f"{layer}.gate.weight")
        return (*ENDS, *NORMS, *ATTENTION, router, *expert_rules(layer, MIXTRAL), *tied_head(model))


@frozen(kw_only=True)
class Qwen2MoE(ArchitectureComponent):
    """Qwen1.5-MoE and Qwen2-MoE: shared experts behind a separate gate."""

    name = "Qwen2MoeForCausalLM"
    harmless = ("output_router_logits", "router_aux_loss_coef")
    training_only = BALANCE

    def fields(self) -> Sequence[Field]:
        """Returns the keys; queries, keys and values have biases, or nothing has."""
        return (
            *shape_fields(),
            *attention_fields(kv_heads=16),
            LayerWindows(default=4096, switched=True, rule=odd_windows, further=("max_window_layers",)),
            Choice("qkv_bias", QKV_BIASES, True),
            *dense_layers(),
            *router_fields(),
            Fixed({"ffn.shared_gate": True}),  # always, in `Qwen2MoeSparseMoeBlock`
            SharedWidth(),
            Key("rms_norm_eps", "norm.eps", 1e-6),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules of dense layers and of layers with experts: a model may have both."""
        layer = "model.layers.{layer}.mlp"
        shared = [
            Same(f"layers.{{layer}}.ffn.shared.{ours}.weight", f"{layer}.shared_expert.{theirs}.weight")
            for ours, theirs in MATRICES.items()
        ]
        gate = Same("layers.{layer}.ffn.shared_gate.weight", f"{layer}.shared_expert_gate.weight")
        router = Same("layers.{layer}.ffn.router.weight", f"{layer}.gate.weight")
        experts = expert_rules(layer)
        return (*ENDS, *NORMS, *ATTENTION, *FFN, router, *experts, *shared, gate, *tied_head(model))


@frozen(kw_only=True)
class Qwen3MoE(ArchitectureComponent):
    """Qwen3-30B-A3B, Qwen3-235B-A22B and their like."""

    name = "Qwen3MoeForCausalLM"
    # All its layers have a window, or none.
    harmless = ("max_window_layers", "output_router_logits", "router_aux_loss_coef")
    training_only = BALANCE

    def fields(self) -> Sequence[Field]:
        return (
            *shape_fields(),
            *attention_fields(kv_heads=4),
            Window(default=4096, switched=True),
            all_biases(),
            Fixed({"attention.qk_norm": True}),
            *dense_layers(),
            *router_fields(),
            Key("rms_norm_eps", ("norm.eps", "attention.qk_norm_eps"), 1e-6),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """As in Qwen2-MoE, with norms of queries and keys, and without shared experts."""
        layer = "model.layers.{layer}.mlp"
        router = Same("layers.{layer}.ffn.router.weight", f"{layer}.gate.weight")
        return (*ENDS, *NORMS, *ATTENTION, *QK_NORM, *FFN, router, *expert_rules(layer), *tied_head(model))


@frozen(kw_only=True)
class GraniteMoE(ArchitectureComponent):
    """Granite 3.0 and 3.1 with experts, and PowerMoE: factors as Granite's, routing as Mixtral's."""

    name = "GraniteMoeForCausalLM"
    seldom = True
    harmless = ("output_router_logits", "router_aux_loss_coef")
    training_only = BALANCE

    def fields(self) -> Sequence[Field]:
        return (
            *shape_fields(),
            Fixed({"attention.qk_norm": False}),
            *attention_fields(),
            all_biases(),
            *granite_factors(),
            Choice("hidden_act", {"silu": {"ffn.type": f"{MOE}/moe"}}, "silu", "experts are gated by silu"),
            Fixed({"ffn.router.type": f"{MOE}/softmax_topk", "ffn.router.normalise": "after"}),
            Key("num_local_experts", "ffn.experts", 8),
            Key("num_experts_per_tok", "ffn.router.top_k", 2),
            Key("intermediate_size", "ffn.hidden", derived=lambda model: default_hidden(model["dim"])),
            Irrelevant("ffn.dense.hidden", 0, {"ffn.first_dense": 0, "ffn.every": 1}),  # no layer is dense
            Key("rms_norm_eps", "norm.eps", 1e-6),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; gate and up projection of all experts are one stack."""
        ours, theirs = "layers.{layer}.ffn", "model.layers.{layer}.block_sparse_moe"
        experts = (
            Same(f"{ours}.router.weight", f"{theirs}.router.layer.weight"),
            StackedRows([f"{ours}.experts.{gate}.weight" for gate in ("gate", "up")], f"{theirs}.input_linear.weight"),
            Same(f"{ours}.experts.down.weight", f"{theirs}.output_linear.weight"),
        )
        return (*ENDS, *NORMS, *ATTENTION, *experts, *tied_head(model))


@frozen(kw_only=True)
class OlMoE(ArchitectureComponent):
    """OLMoE: norms over all heads of queries and of keys, experts that a softmax chooses in every layer."""

    name = "OlmoeForCausalLM"
    harmless = ("output_router_logits", "router_aux_loss_coef")
    training_only = BALANCE

    def fields(self) -> Sequence[Field]:
        """Returns the keys; `OlmoeAttention` has norms as wide as the model, so that heads divide its width."""
        heads = "num_attention_heads"
        return (
            *shape_fields(),
            *(field for field in attention_fields() if "head_dim" not in field.keys),
            Derived(HEAD_DIM, lambda model: model["dim"] // model["attention.heads"]),
            Follows(
                HEAD_DIM,
                lambda config: config["hidden_size"] // config[heads],
                lambda model: model["dim"] // model["attention.heads"],
            ),
            all_biases(),
            Fixed({"attention.qk_norm": "all"}),
            Only("clip_qkv", None, "queries, keys and values are not bounded"),
            *(field for field in router_fields() if "moe_intermediate_size" not in field.keys),
            Key("intermediate_size", "ffn.hidden", derived=lambda model: default_hidden(model["dim"])),
            Irrelevant("ffn.dense.hidden", 0, {"ffn.first_dense": 0, "ffn.every": 1}),  # no layer is dense
            Key("rms_norm_eps", ("norm.eps", "attention.qk_norm_eps"), 1e-5),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """As in Qwen3-MoE, without layers that lack experts."""
        layer = "model.layers.{layer}.mlp"
        router = Same("layers.{layer}.ffn.router.weight", f"{layer}.gate.weight")
        return (*ENDS, *NORMS, *ATTENTION, *QK_NORM, router, *expert_rules(layer), *tied_head(model))


@frozen
class RotaryWidth(Rope):
    """The position encoding, whose rotated part of a head MiniMax's files give as a width: `rotary_dim`."""

    @property
    def keys(self) -> Collection[str]:
        return (*super().keys, ROTARY_WIDTH)

    def read(self, config: Config) -> Flat:
        """Reads the width as a share of the head, which a key has precedence over, as in transformers."""
        if config.get(ROTARY_WIDTH) is None:
            return super().read(config)
        share = config[ROTARY_WIDTH] / value_of(config, "head_dim", 128)
        completed = {SHARE: share, **config}
        if config.get("rope_parameters"):
            completed["rope_parameters"] = {SHARE: completed[SHARE], **config["rope_parameters"]}
        return super().read(completed)


@frozen(kw_only=True)
class MiniMaxM2(ArchitectureComponent):
    """MiniMax-M2 to M2.7: norms over all heads of queries and of keys, experts that a sigmoid chooses."""

    name = "MiniMaxM2ForCausalLM"
    # Blocks of multi-token prediction are in none of the files.
    harmless = (
        *("output_router_logits", "router_aux_loss_coef", "num_mtp_modules", "mtp_transformer_layers", "use_mtp"),
        "mlp_intermediate_size",  # of a layer that the class has not
    )
    training_only = (*BALANCE, "ffn.router.bias_rate")

    def fields(self) -> Sequence[Field]:
        """Returns the keys; those with one value describe what the class always has."""
        only = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}
        absent = {"shared_intermediate_size": 0, "attention_bias": False, "sliding_window": None}
        return (
            *shape_fields(),
            *attention_fields(head_dim=128, kv_heads=8, rope=RotaryWidth(theta=5e6, share=1.0)),
            Fixed({"attention.bias": False, "attention.qk_norm": "all"}),
            Choice("hidden_act", {"silu": {"ffn.type": f"{MOE}/moe"}}, "silu", "experts are gated by silu"),
            Fixed({"ffn.router.type": f"{MOE}/sigmoid_topk", "ffn.router.normalise": True}),
            Key("num_local_experts", "ffn.experts", 256, other_names=("num_experts",)),
            Key("num_experts_per_tok", "ffn.router.top_k", 8),
            Key("intermediate_size", "ffn.hidden", derived=lambda model: default_hidden(model["dim"])),
            Irrelevant("ffn.dense.hidden", 0, {"ffn.first_dense": 0, "ffn.every": 1}),  # no layer is dense
            *(Only(key, value, "the class has no other", write_it=False) for key, value in (only | absent).items()),
            AttentionTypes(),
            Only("router_jitter_noise", 0.0, "routers add no noise of this kind"),
            Key("rms_norm_eps", ("norm.eps", "attention.qk_norm_eps"), 1e-6),
        )

    def repeated(self, config: Config) -> Config:
        return {ROTARY_WIDTH: round(config[SHARE] * config["head_dim"]), "scoring_func": "sigmoid"}

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; the bias of the router is beside its matrix."""
        layer = "model.layers.{layer}.block_sparse_moe"
        router = (
            Same("layers.{layer}.ffn.router.weight", f"{layer}.gate.weight"),
            Same("layers.{layer}.ffn.router.bias", f"{layer}.e_score_correction_bias"),
        )
        return (*ENDS, *NORMS, *ATTENTION, *QK_NORM, *router, *expert_rules(layer, MIXTRAL), *tied_head(model))


@frozen
class AttentionTypes(Field):
    """`attn_type_list`, with a 1 for each layer, whose attention is a softmax."""

    @property
    def keys(self) -> Collection[str]:
        return ("attn_type_list",)

    @property
    def written(self) -> Collection[str]:
        """Empty: every layer of the class is so."""
        return ()

    def read(self, config: Config) -> Flat:
        """Raises `Unsupported` for linear attention, which MiniMax-Text-01 has."""
        if others := {*(config.get("attn_type_list") or ())} - {1}:
            raise Unsupported(f"attn_type_list has {sorted(others)[0]!r}; attention by a softmax, 1, works")
        return {}


def router_fields(*, normalised: bool | None = None, default: bool = False) -> Sequence[Field]:
    """Returns the keys of experts that a softmax chooses, as Qwen's have them.

    Args:
        normalised: whether weights of the chosen experts add up to 1; None: a key specifies it.
        default: whether they do where that key is missing.
    """
    options: dict[bool, Flat] = {
        value: {"ffn.router.type": f"{MOE}/softmax_topk", "ffn.router.normalise": name}
        for value, name in ((False, "before"), (True, "after"))
    }
    return (
        Choice("hidden_act", {"silu": {"ffn.type": f"{MOE}/moe"}}, "silu", "experts are gated by silu"),
        Choice("norm_topk_prob", options, default) if normalised is None else Fixed(options[normalised]),
        Key("num_experts", "ffn.experts", other_names=("num_local_experts",)),
        Key("num_experts_per_tok", "ffn.router.top_k"),
        Key("moe_intermediate_size", "ffn.hidden", derived=lambda model: default_hidden(model["dim"])),
    )


@frozen
class SharedWidth(Field):
    """The width of the shared experts, which here is a multiple of a routed expert's width."""

    key: str = WIDTH
    default: object = REQUIRED
    """Of both keys, where they are missing."""

    @property
    def keys(self) -> Collection[str]:
        return (self.key,)

    def read(self, config: Config) -> Flat:
        """Reads the number of shared experts, whose common width has to be a multiple of a routed expert's."""
        width, one = (value_of(config, key, self.default) for key in (self.key, "moe_intermediate_size"))
        if width % one:
            raise Unsupported(f"{self.key} = {width}; a multiple of moe_intermediate_size = {one} works")
        return {"ffn.shared_experts": width // one}

    def write(self, model: Flat) -> Config:
        """Writes the width of all shared experts together, which are one in `transformers`."""
        return {self.key: setting(model, "ffn.shared_experts") * setting(model, "ffn.hidden")}
