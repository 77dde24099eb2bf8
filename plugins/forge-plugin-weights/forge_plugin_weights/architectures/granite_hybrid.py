"""Granite 4: Mamba-2 in most layers or none, attention without positions in the rest, experts beside a shared part."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from attrs import field, frozen

from forge_plugin_transformer.layer_parts import default_hidden
from forge_plugin_weights.architectures.dense import (
    ATTENTION,
    ENDS,
    NORMS,
    TRANSFORMER,
    all_biases,
    attention_fields,
    shape_fields,
    tied_head,
)
from forge_plugin_weights.architectures.experts import BALANCE, MOE
from forge_plugin_weights.architectures.llama_like import granite_factors
from forge_plugin_weights.architectures.qwen3_next import LINEAR, TYPE, MixedLayers, in_layer
from forge_plugin_weights.fields import (
    REQUIRED,
    Choice,
    Derived,
    Dropout,
    Fixed,
    Follows,
    Irrelevant,
    Key,
    Rope,
    setting,
    value_of,
)
from forge_plugin_weights.keys_by_layer import NO_ROPE, of_layers
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule, Unsupported
from forge_plugin_weights.layer_fields import FULL, depth
from forge_plugin_weights.rules import FilterRows, Rows, Same, StackedRows

MAMBA = "forge-plugin-linear-attention/mamba2"
LIMITS = "attention.dt_limit"
INFINITY: Mapping[str, str] = {"__float__": "Infinity"}
"""As transformers writes it."""
ENTRIES: Mapping[str, str] = {"mamba": "linear_attention", "attention": FULL}
"""Entries of `layer_types` in published files, and as version 5 of transformers writes them."""
OURS, THEIRS = "layers.{layer}.attention", "model.layers.{layer}.mamba"
PROJECTIONS, CONVOLVED = ("gate", "x", "b", "c", "step"), ("x", "b", "c")
NUMBERS: Mapping[str, str] = {"log_rate.weight": "A_log", "offset.weight": "dt_bias", "skip.weight": "D"}


@frozen(kw_only=True)
class MambaLayers(MixedLayers):
    """Mamba-2 in some layers and attention in the rest; all layers have Mamba-2 where there is no list."""

    def layers(self, config: Config) -> Sequence[bool]:
        """Returns which layers have attention, by either spelling of the entries."""
        types = config.get("layer_types")
        if types is None:
            return [False] * depth(config)
        return super().layers({**config, "layer_types": [ENTRIES.get(entry, entry) for entry in types]})

    def write(self, model: Flat) -> Config:
        """Writes the entries of published files, which all versions of transformers read."""
        spelling = {later: first for first, later in ENTRIES.items()}
        config = dict(super().write(model))
        if LINEAR not in config["layer_types"]:
            config |= unused_heads(setting(model, "dim"))
        return {**config, "layer_types": [spelling[entry] for entry in config["layer_types"]]}


def unused_heads(width: int) -> Config:
    """Returns keys of Mamba-2 for a model without: the classes refuse their defaults where 128 heads do not fit."""
    heads = math.gcd(128, 2 * width)
    return {"mamba_n_heads": heads, "mamba_d_head": 2 * width // heads, "mamba_expand": 2} if heads < 128 else {}


@frozen
class MambaWidth(Field):
    """The width of a head of Mamba-2, which follows from a multiple of the model's width."""

    @property
    def keys(self) -> Collection[str]:
        return ("mamba_d_head", "mamba_expand")

    def read(self, config: Config) -> Flat:
        """Reads the width of a head, or the quotient; raises `Unsupported` where both are there and differ."""
        heads, multiple = value_of(config, "mamba_n_heads", 128), value_of(config, "mamba_expand", 2)
        width, given = multiple * config["hidden_size"] // heads, value_of(config, "mamba_d_head", "auto")
        if given not in ("auto", width):
            message = f"mamba_d_head = {given!r}, where {heads} heads of mamba_expand = {multiple} have {width}"
            raise Unsupported(message)
        return {"attention.head_dim": width}

    def write(self, model: Flat) -> Config:
        """Writes both; raises `Unsupported` for a width that is no multiple of the model's."""
        heads, width = setting(model, "attention.heads"), setting(model, "attention.head_dim")
        whole = setting(model, "dim")
        if heads * width % whole:
            raise Unsupported(f"{heads} heads of {width}; a multiple of model.dim = {whole} works")
        return {"mamba_d_head": width, "mamba_expand": heads * width // whole}

    def resolve(self, model: Flat) -> Flat:
        """Returns the width that 0 stands for."""
        width = 2 * model["dim"] // model["attention.heads"]
        return {} if model["attention.head_dim"] else {"attention.head_dim": width}


@frozen
class StepLimit(Field):
    """Bounds of the step of Mamba-2; an infinite one is our 0."""

    @property
    def keys(self) -> Collection[str]:
        return ("time_step_limit",)

    @property
    def written(self) -> Collection[str]:
        """Empty: published files have none, and neither have exports without bounds."""
        return ()

    def read(self, config: Config) -> Flat:
        """Reads two numbers, also as transformers spells infinity in JSON, which has none."""
        limits = config.get("time_step_limit") or (0.0, math.inf)
        low, high = (float(each["__float__"] if isinstance(each, Mapping) else each) for each in limits)
        return {LIMITS: [low, 0.0 if math.isinf(high) else high]}

    def write(self, model: Flat) -> Config:
        """Writes the bounds, if there are any."""
        low, high = setting(model, LIMITS)
        return {"time_step_limit": [low, high or INFINITY]} if low or high else {}


@frozen
class RopeOrNone(Field):
    """The position encoding of layers with attention, which a key switches on."""

    rope: Rope = field(factory=Rope)

    @property
    def keys(self) -> Collection[str]:
        return ("position_embedding_type", *self.rope.keys)

    @property
    def written(self) -> Collection[str]:
        """Without keys of the encoding, which a model need not have."""
        return ("position_embedding_type",)

    def read(self, config: Config) -> Flat:
        """Reads the encoding, or none where the key is not `rope`; then its other keys mean nothing."""
        if config.get("position_embedding_type") == "rope":
            return self.rope.read(config)
        return {f"{self.rope.path}.type": NO_ROPE}

    def write(self, model: Flat) -> Config:
        """Writes `nope` for none, as published files do."""
        if model.get(f"{self.rope.path}.type") == NO_ROPE:
            return {"position_embedding_type": "nope"}
        return {"position_embedding_type": "rope", **self.rope.write(model)}

    def resolve(self, model: Flat) -> Flat:
        """Returns what the encoding resolves."""
        return self.rope.resolve(model)


@frozen
class SharedPart(Field):
    """The feed-forward parts: one that all tokens go through, and routed experts beside it, if there are any."""

    experts: Sequence[Field]
    """The keys of experts."""

    @property
    def keys(self) -> Collection[str]:
        return ("shared_intermediate_size", *(key for each in self.experts for key in each.keys))

    @property
    def written(self) -> Collection[str]:
        """Keys of models with experts and without."""
        return ("shared_intermediate_size", "num_local_experts", "num_experts_per_tok")

    def read(self, config: Config) -> Flat:
        """Reads experts, whose width divides the width of the shared part; or the shared part alone."""
        width = int(value_of(config, "shared_intermediate_size", 1024))
        # 0 and not null, which means the default
        if config.get("num_local_experts") == 0:
            return {"ffn.type": f"{TRANSFORMER}/swiglu", "ffn.hidden": width}
        one = int(value_of(config, "intermediate_size", REQUIRED))
        if width % one:
            raise Unsupported(f"shared_intermediate_size = {width}; a multiple of intermediate_size = {one} works")
        routed = {path: value for each in self.experts for path, value in each.read(config).items()}
        return {**routed, "ffn.shared_experts": width // one}

    def write(self, model: Flat) -> Config:
        """Writes 0 experts for a model without; raises `Unsupported` for experts without a shared part."""
        width = setting(model, "ffn.hidden")
        if model.get("ffn.type") == f"{TRANSFORMER}/swiglu":
            none = {"num_local_experts": 0, "num_experts_per_tok": 0}
            return {"shared_intermediate_size": width, "intermediate_size": width, **none}
        config = {key: value for each in self.experts for key, value in each.write(model).items()}
        if not (shared := setting(model, "ffn.shared_experts")):
            raise Unsupported("ffn.shared_experts = 0; Granite has one at least")
        return {**config, "shared_intermediate_size": shared * width}

    def resolve(self, model: Flat) -> Flat:
        """Returns the width that 0 stands for, and what experts resolve."""
        # A model of another kind has none of these keys
        known = {} if model.get("ffn.hidden", 1) else {"ffn.hidden": default_hidden(model["dim"])}
        for each in self.experts if model.get("ffn.type") == f"{MOE}/moe" else ():
            known |= each.resolve({**model, **known})
        return known


def mamba_fields(*, eps: float) -> Sequence[Field]:
    """Returns the keys of layers with Mamba-2; `eps` is the default of `rms_norm_eps`."""
    groups = "attention.groups"
    return (
        Fixed({TYPE: MAMBA, "attention.norm": "after"}),
        Key("mamba_n_heads", "attention.heads", 128),
        MambaWidth(),
        Key("mamba_n_groups", groups, 1),
        Derived("attention.norm_groups", lambda model: model[groups]),
        Follows(
            "attention.norm_groups",
            lambda config: value_of(config, "mamba_n_groups", 1),
            lambda model: model[groups],
        ),
        Key("mamba_d_state", "attention.state", 256),
        Key("mamba_d_conv", "attention.conv", 4),
        Key("mamba_conv_bias", "attention.conv_bias", True, null=False),
        Key("mamba_proj_bias", "attention.bias", False),
        Key("rms_norm_eps", "attention.norm_eps", eps),
        StepLimit(),
    )


@frozen(kw_only=True)
class GraniteHybrid(ArchitectureComponent):
    """Granite 4.0 (IBM 2025): h-350m to h-small with Mamba-2, and those with attention alone."""

    name = "GraniteMoeHybridForCausalLM"
    harmless = (
        *("output_router_logits", "router_aux_loss_coef", "mamba_chunk_size"),
        *("init_method", "normalization_function"),  # notes: `mup`, and `rmsnorm`, which the class always has
    )
    training_only = (*BALANCE, "attention.chunk")

    def fields(self) -> Sequence[Field]:
        """Returns the keys; the factor on scores is of layers with attention alone."""
        scale, *factors = granite_factors()
        gqa = attention_fields(rope=RopeOrNone())
        full = (
            *(each for each in gqa if not isinstance(each, Dropout)),
            Fixed({"attention.qk_norm": False}),
            all_biases(),
            scale,
        )
        experts = (
            Fixed({"ffn.type": f"{MOE}/moe"}),
            Fixed({"ffn.router.type": f"{MOE}/softmax_topk", "ffn.router.normalise": "after"}),
            Key("num_local_experts", "ffn.experts", 8),
            Key("num_experts_per_tok", "ffn.router.top_k", 2),
            Key("intermediate_size", "ffn.hidden"),
            Irrelevant("ffn.dense.hidden", 0, {"ffn.first_dense": 0, "ffn.every": 1}),  # no layer is dense
        )
        return (
            *shape_fields(),
            MambaLayers(full=full, linear=mamba_fields(eps=1e-6), component=MAMBA, further=()),
            Dropout("attention_dropout"),
            *factors,
            Choice("hidden_act", {"silu": {}}, "silu", "parts are gated by silu"),
            SharedPart(experts),
            Key("rms_norm_eps", "norm.eps", 1e-6),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules of layers of both kinds, each for its layers."""
        shared = "ffn.shared" if model["ffn.type"] == f"{MOE}/moe" else "ffn"
        return (*ENDS, *NORMS, *mixer_rules(model), *shared_rules(shared), *EXPERT_RULES, *tied_head(model))


MAMBA_RULES: Sequence[Rule] = (
    Rows([f"{OURS}.{name}.{{tensor}}" for name in PROJECTIONS], f"{THEIRS}.in_proj.{{tensor}}"),
    FilterRows([f"{OURS}.{name}_conv.weight" for name in CONVOLVED], f"{THEIRS}.conv1d.weight"),
    Rows([f"{OURS}.{name}_conv_bias.weight" for name in CONVOLVED], f"{THEIRS}.conv1d.bias"),
    *(Same(f"{OURS}.{ours}", f"{THEIRS}.{theirs}") for ours, theirs in NUMBERS.items()),
    Same(f"{OURS}.norm.weight", f"{THEIRS}.norm.weight"),
    Same(f"{OURS}.o.{{tensor}}", f"{THEIRS}.out_proj.{{tensor}}"),
)
"""Of a layer with Mamba-2, whose projections are fused."""
EXPERT_RULES: Sequence[Rule] = (
    Same("layers.{layer}.ffn.router.weight", "model.layers.{layer}.block_sparse_moe.router.layer.weight"),
    StackedRows(
        [f"layers.{{layer}}.ffn.experts.{name}.weight" for name in ("gate", "up")],
        "model.layers.{layer}.block_sparse_moe.input_linear.weight",
    ),
    Same("layers.{layer}.ffn.experts.down.weight", "model.layers.{layer}.block_sparse_moe.output_linear.weight"),
)


def mixer_rules(model: Flat) -> Sequence[Rule]:
    """Returns the rules of Mamba-2 and of attention, each for its layers."""
    return [
        in_layer(rule, number)
        for number, own in enumerate(of_layers(model))
        for rule in (MAMBA_RULES if own[TYPE] == MAMBA else ATTENTION)
    ]


def shared_rules(path: str) -> Sequence[Rule]:
    """Returns the rules of the part that all tokens go through, whose gate and up projections are fused."""
    ours, theirs = f"layers.{{layer}}.{path}", "model.layers.{layer}.shared_mlp"
    return (
        Rows([f"{ours}.{name}.weight" for name in ("gate", "up")], f"{theirs}.input_linear.weight"),
        Same(f"{ours}.down.weight", f"{theirs}.output_linear.weight"),
    )
