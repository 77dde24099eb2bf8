"""Nemotron-H: layers of one part each, which is Mamba-2, attention, a feed-forward part or experts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

import attrs
from attrs import frozen

from forge_plugin_transformer.layer_parts import default_hidden
from forge_plugin_weights.architectures.deepseek import TRAINING_ONLY
from forge_plugin_weights.architectures.dense import TRANSFORMER, attention_fields, shape_fields
from forge_plugin_weights.architectures.experts import MOE, SharedWidth, expert_rules
from forge_plugin_weights.architectures.granite_hybrid import LIMITS, MAMBA, MAMBA_RULES
from forge_plugin_weights.architectures.qwen3_next import LINEAR, TYPE, in_layer
from forge_plugin_weights.fields import (
    Choice,
    Derived,
    Dropout,
    Fixed,
    Follows,
    Irrelevant,
    Key,
    Only,
    setting,
    value_of,
)
from forge_plugin_weights.keys_by_layer import NO_PART, NO_ROPE, merged, of_layers
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule, Unsupported
from forge_plugin_weights.layer_fields import FULL
from forge_plugin_weights.rules import Same

MLP, EXPERTS = "mlp", "moe"
LETTERS: Mapping[str, str] = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}
"""Entries of `hybrid_override_pattern`, and of `layers_block_type`."""
FIRST_NAMES: Mapping[str, str] = {"mamba": LINEAR, "attention": FULL}
"""Entries of that list in files of earlier versions of transformers."""
PATTERN, TYPES, DEPTH = "hybrid_override_pattern", ("layers_block_type", "layer_types"), "num_hidden_layers"
FFN_TYPE = "ffn.type"
KINDS: Mapping[tuple[str, str], str] = {
    (MAMBA, NO_PART): LINEAR,
    (f"{TRANSFORMER}/gqa", NO_PART): FULL,
    (NO_PART, f"{TRANSFORMER}/relu2"): MLP,
    (NO_PART, f"{MOE}/moe"): EXPERTS,
}
"""Entries by the types of attention and of the feed-forward part."""
MATRICES: Mapping[str, str] = {"up": "up_proj", "down": "down_proj"}
LAYER = "backbone.layers.{layer}"
MIXER = f"{LAYER}.mixer"
ROUTED, SHARED = "moe_intermediate_size", "moe_shared_expert_intermediate_size"
EPS = "layer_norm_epsilon"


def entries_of(config: Config) -> Sequence[str]:
    """Returns the entry of each layer, by its list or its letters; raises `Unsupported` where they differ."""
    listed = next((config[key] for key in TYPES if config.get(key) is not None), None)
    found: list[list[str]] = []
    if listed is not None:
        found.append([FIRST_NAMES.get(entry, entry) for entry in listed])
    if (letters := config.get(PATTERN)) is not None:
        found.append([LETTERS.get(letter, letter) for letter in letters])
    if not found:
        raise Unsupported(f"{TYPES[0]} and {PATTERN} are missing")
    if unknown := [entry for entry in found[0] if entry not in LETTERS.values()]:
        raise Unsupported(f"a layer is {unknown[0]!r}; Forge has {', '.join(map(repr, LETTERS.values()))}")
    if found[0] != found[-1]:
        raise Unsupported(f"{TYPES[0]} has other layers than {PATTERN} = {letters!r}")
    if config.get(DEPTH) not in (None, len(found[0])):
        raise Unsupported(f"{DEPTH} = {config[DEPTH]}, where {len(found[0])} layers are listed")
    return found[0]


@frozen(kw_only=True)
class OnePart(Field):
    """Layers of one part each."""

    parts: Mapping[str, Sequence[Field]]
    """The keys of a layer by its entry."""

    @property
    def keys(self) -> Collection[str]:
        return (
            PATTERN,
            *TYPES,
            DEPTH,
            *(key for fields in self.parts.values() for each in fields for key in each.keys),
        )

    @property
    def written(self) -> Collection[str]:
        """The lists alone: a model need not have layers of each kind."""
        return (PATTERN, TYPES[0], DEPTH)

    def read(self, config: Config) -> Flat:
        """Reads the keys of the kinds that layers have, and gives each layer those of its kind."""
        entries = entries_of(config)
        tables = {
            entry: {path: value for each in self.parts[entry] for path, value in each.read(config).items()}
            for entry in dict.fromkeys(entries)
        }
        return {"layers": len(entries), **merged([tables[entry] for entry in entries])}

    def write(self, model: Flat) -> Config:
        """Writes the keys of the kinds that layers have; raises `Unsupported` for a layer of other parts."""
        layers = of_layers(model)
        entries = [self._entry(number, own) for number, own in enumerate(layers)]
        letters = {entry: letter for letter, entry in LETTERS.items()}
        config: dict[str, Any] = {
            TYPES[0]: entries,
            # Of files of the publisher, and of programs that read these
            PATTERN: "".join(letters[entry] for entry in entries),
            DEPTH: len(entries),
        }
        for entry in dict.fromkeys(entries):
            alike = merged(list(compress(layers, [each == entry for each in entries])))
            for each in self.parts[entry]:
                config |= each.write(alike)
        return config

    def resolve(self, model: Flat) -> Flat:
        """Returns what 0 stands for in a layer of its kind."""
        known = dict(model)
        for each in self.parts.get(KINDS.get((model.get(TYPE, ""), model.get(FFN_TYPE, "")), ""), ()):
            known |= each.resolve(known)
        return {path: value for path, value in known.items() if path not in model or model[path] != value}

    def _entry(self, number: int, own: Flat) -> str:
        types = own.get(TYPE), own.get(FFN_TYPE)
        for known, entry in KINDS.items():
            if types == known:
                return entry
        raise Unsupported(f"layer {number} has {TYPE} = {types[0]!r} and {FFN_TYPE} = {types[1]!r}, no single part")


@frozen
class Repeats(Field):
    """A key that repeats another one, which alone the class reads; it is not written."""

    theirs: str
    of: str
    default: Any

    @property
    def keys(self) -> Collection[str]:
        return (self.theirs,)

    @property
    def written(self) -> Collection[str]:
        """Empty."""
        return ()

    def read(self, config: Config) -> Flat:
        """Raises `Unsupported` where they differ."""
        value, read = config.get(self.theirs), value_of(config, self.of, self.default)
        if value not in (None, read):
            raise Unsupported(f"{self.theirs} = {value!r}, where {self.of} = {read!r}, which the class reads")
        return {}


@frozen
class SmallestStep(Field):
    """The lower bound of the step of Mamba-2: `time_step_min` in the code of the class, whatever `time_step_limit`."""

    @property
    def keys(self) -> Collection[str]:
        return ("time_step_min", "time_step_limit")

    @property
    def written(self) -> Collection[str]:
        """The key that the class reads."""
        return ("time_step_min",)

    def read(self, config: Config) -> Flat:
        """Reads the bound; raises `Unsupported` for a `time_step_limit` that bounds anything, as the class does not."""
        limits = config.get("time_step_limit") or (0.0, math.inf)
        low, high = (float(each["__float__"] if isinstance(each, Mapping) else each) for each in limits)
        if low or not math.isinf(high):
            raise Unsupported(f"time_step_limit = {limits!r}; [0, Infinity] works: the class reads time_step_min alone")
        return {LIMITS: [value_of(config, "time_step_min", 0.001), 0.0]}

    def write(self, model: Flat) -> Config:
        """Writes the lower bound; raises `Unsupported` for an upper one."""
        low, high = setting(model, LIMITS)
        if high:
            raise Unsupported(f"{LIMITS} has an upper bound, {high!r}, where steps have a lower one alone")
        return {"time_step_min": low}


@frozen
class SharedExperts(SharedWidth):
    """The width of the shared expert, which the class always has."""

    key: str = SHARED
    default: object = 7688

    def write(self, model: Flat) -> Config:
        """Writes the width; raises `Unsupported` for none."""
        if not setting(model, "ffn.shared_experts"):
            raise Unsupported("ffn.shared_experts = 0; Nemotron-H has one at least")
        return super().write(model)


def mamba_part() -> Sequence[Field]:
    """Returns the keys of a layer with Mamba-2."""
    groups = "attention.groups"
    return (
        Fixed({TYPE: MAMBA, "attention.norm": "after", FFN_TYPE: NO_PART}),
        Key("mamba_num_heads", "attention.heads", 128),
        Key("mamba_head_dim", "attention.head_dim", 64, lambda model: 2 * model["dim"] // model["attention.heads"]),
        Key("n_groups", groups, 8, other_names=("mamba_n_groups",)),
        Derived("attention.norm_groups", lambda model: model[groups]),
        Follows(
            "attention.norm_groups",
            lambda config: value_of(config, "mamba_n_groups", value_of(config, "n_groups", 8)),
            lambda model: model[groups],
        ),
        Key("ssm_state_size", "attention.state", 128),
        Key("conv_kernel", "attention.conv", 4, other_names=("mamba_d_conv",)),
        Key("use_conv_bias", "attention.conv_bias", True, null=False, other_names=("mamba_conv_bias",)),
        Key("use_bias", "attention.bias", False),
        Only("mamba_proj_bias", False, "use_bias is the key of its biases"),
        Only("mamba_hidden_act", "silu", "mamba2 has silu"),
        Key(EPS, "attention.norm_eps", 1e-5),
        SmallestStep(),
    )


def attention_part() -> Sequence[Field]:
    """Returns the keys of a layer with attention, which encodes no positions and has no biases."""
    gqa = attention_fields(head_dim=128, kv_heads=8, rope=Fixed({"attention.rope.type": NO_ROPE}))
    return (
        *(each for each in gqa if not isinstance(each, Dropout)),
        Fixed({FFN_TYPE: NO_PART, "attention.qk_norm": False, "attention.bias": False}),
        Only("attention_bias", False, "the class has none"),
        Only("sliding_window", None, "the class has no windows"),
    )


def dense_part() -> Sequence[Field]:
    """Returns the keys of a layer with a feed-forward part."""
    return (
        Fixed({TYPE: NO_PART}),
        Choice("mlp_hidden_act", {"relu2": {FFN_TYPE: f"{TRANSFORMER}/relu2"}}, "relu2", "the square of relu"),
        Key("mlp_bias", "ffn.bias", False),
        Key("intermediate_size", "ffn.hidden", 21504, lambda model: 4 * model["dim"]),
    )


def experts_part() -> Sequence[Field]:
    """Returns the keys of a layer with experts, of which a sigmoid chooses."""
    return (
        Fixed({TYPE: NO_PART, "ffn.activation": "relu2", "ffn.router.type": f"{MOE}/sigmoid_topk"}),
        Choice("mlp_hidden_act", {"relu2": {FFN_TYPE: f"{MOE}/moe"}}, "relu2", "the square of relu"),
        Only("mlp_bias", False, "experts of relu2 have no biases"),
        Only("moe_latent_size", None, "experts have the width of the model"),
        Only("n_shared_experts", 1, f"{SHARED} has the width of all"),
        Irrelevant("ffn.dense.hidden", 0, {"ffn.first_dense": 0, "ffn.every": 1}),  # no such layer is dense
        Key(ROUTED, "ffn.hidden", 7688, lambda model: default_hidden(model["dim"])),
        SharedExperts(),
        Key("n_routed_experts", "ffn.experts", 8, other_names=("num_local_experts",)),
        Key("num_experts_per_tok", "ffn.router.top_k", 2),
        Key("routed_scaling_factor", "ffn.router.scaling", 1.0),
        Key("n_group", "ffn.router.groups", 1),
        Key("topk_group", "ffn.router.top_groups", 1),
        Key("norm_topk_prob", "ffn.router.normalise", True),
    )


@frozen(kw_only=True)
class NemotronH(ArchitectureComponent):
    """Nemotron-H (NVIDIA 2025, arXiv 2504.03624), Nemotron Nano 2 and Nemotron 3 Nano."""

    name = "NemotronHForCausalLM"
    harmless = (
        *("chunk_size", "mamba_chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype", "num_logits_to_keep"),
        # How initial weights are drawn
        *("time_step_max", "time_step_floor", "time_step_rank", "rescale_prenorm_residual"),
        *("mamba_dt_max", "mamba_dt_init_floor"),
        # A width that the class computes from heads, and an encoding of positions that it has not
        *("expand", "mamba_expand", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
        *("moe_shared_expert_overlap", "output_router_logits"),
        # Multi-token prediction, which is left out
        *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    )
    training_only = (*TRAINING_ONLY, "attention.chunk")
    left_out = (*ArchitectureComponent.left_out, "mtp.*")

    def fields(self) -> Sequence[Field]:
        """Returns the keys of layers of each kind, and those of all."""
        parts = {LINEAR: mamba_part(), FULL: attention_part(), MLP: dense_part(), EXPERTS: experts_part()}
        return (
            *(each for each in shape_fields() if not {DEPTH, "tie_word_embeddings"}.intersection(each.keys)),
            Fixed({"tie_embeddings": False}),
            Only("tie_word_embeddings", False, "the class has a head beside the embedding"),
            OnePart(parts=parts),
            Key(EPS, "norm.eps", 1e-5),
            Repeats("norm_eps", EPS, 1e-5),
            Repeats("rms_norm_eps", EPS, 1e-5),
            Repeats("attention_head_dim", "head_dim", 128),
            Repeats("num_query_groups", "num_key_value_heads", 8),
            Only("residual_in_fp32", False, "the stream has the precision of the job"),
            Dropout("attention_dropout"),
            Dropout("hidden_dropout"),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules of the ends, and of each layer by its kind."""
        ends = {"embedding": "backbone.embeddings", "norm": "backbone.norm_f", "head": "lm_head"}
        layers = (
            in_layer(rule, number)
            for number, own in enumerate(of_layers(model))
            for rule in LAYER_RULES[KINDS[own[TYPE], own[FFN_TYPE]]]
        )
        return (*(Same(f"{ours}.weight", f"{theirs}.weight") for ours, theirs in ends.items()), *layers)


def _mamba_rules() -> Iterator[Rule]:
    for rule in MAMBA_RULES:
        known: Any = rule
        yield attrs.evolve(known, theirs=known.theirs.replace("model.layers.{layer}.mamba", MIXER))


ATTENTION_NORM = Same("layers.{layer}.attention_norm.weight", f"{LAYER}.norm.weight")
FFN_NORM = Same("layers.{layer}.ffn_norm.weight", f"{LAYER}.norm.weight")
LAYER_RULES: Mapping[str, Sequence[Rule]] = {
    LINEAR: (ATTENTION_NORM, *_mamba_rules()),
    FULL: (
        ATTENTION_NORM,
        *(Same(f"layers.{{layer}}.attention.{name}.weight", f"{MIXER}.{name}_proj.weight") for name in "qkvo"),
    ),
    MLP: (
        FFN_NORM,
        *(
            Same(f"layers.{{layer}}.ffn.{ours}.{{tensor}}", f"{MIXER}.{theirs}.{{tensor}}")
            for ours, theirs in MATRICES.items()
        ),
    ),
    EXPERTS: (
        FFN_NORM,
        Same("layers.{layer}.ffn.router.weight", f"{MIXER}.gate.weight"),
        Same("layers.{layer}.ffn.router.bias", f"{MIXER}.gate.e_score_correction_bias"),
        *expert_rules(MIXER, MATRICES),
        *(
            Same(f"layers.{{layer}}.ffn.shared.{ours}.weight", f"{MIXER}.shared_experts.{theirs}.weight")
            for ours, theirs in MATRICES.items()
        ),
    ),
}
"""The rules of a layer by its entry."""
