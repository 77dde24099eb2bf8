"""Qwen3-Next: three layers of Gated DeltaNet to one of gated attention, and experts in every layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import compress
from typing import Any

import attrs
from attrs import frozen

from forge_plugin_weights.architectures.dense import (
    ENDS,
    FFN,
    NORMS,
    QK_NORM,
    all_biases,
    attention_fields,
    named_alike,
    shape_fields,
    tied_head,
)
from forge_plugin_weights.architectures.experts import (
    BALANCE,
    MATRICES,
    SharedWidth,
    dense_layers,
    expert_rules,
    router_fields,
)
from forge_plugin_weights.fields import Dropout, Fixed, Key, Only, Rope, value_of
from forge_plugin_weights.keys_by_layer import merged, of_layers
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule, Unsupported
from forge_plugin_weights.layer_fields import FULL, depth
from forge_plugin_weights.rules import FilterRows, HeadRows, Same

LINEAR = "linear_attention"
TYPE = "attention.type"
DELTA = "forge-plugin-linear-attention/gated_deltanet"
SETTINGS: Mapping[str, str] = {
    "linear_num_value_heads": "attention.heads",
    "linear_num_key_heads": "attention.key_heads",
    "linear_key_head_dim": "attention.head_dim",
    "linear_value_head_dim": "attention.value_dim",
    "linear_conv_kernel_dim": "attention.conv",
}
"""Keys of layers with Gated DeltaNet: theirs, ours."""
DEFAULTS: Mapping[str, int] = dict(zip(SETTINGS, (32, 16, 128, 128, 4), strict=True))
THEIRS = "model.layers.{layer}.linear_attn"
OURS = "layers.{layer}.attention"


def _width(model: Flat) -> int:
    return int(model["dim"] // model["attention.heads"])


DERIVED = {
    "attention.key_heads": lambda model: model["attention.heads"],
    "attention.head_dim": _width,
    "attention.value_dim": lambda model: model["attention.head_dim"],
}
"""What 0 stands for on our side."""


def each_nth_is_full(config: Config) -> Sequence[bool]:
    """Returns which layers of Qwen3-Next have softmax attention if no list specifies them: each fourth by default."""
    interval = value_of(config, "full_attention_interval", 4)
    return [(layer + 1) % interval == 0 for layer in range(depth(config))]


@frozen(kw_only=True)
class MixedLayers(Field):
    """Attention that is of one component in some layers and of another one in the rest, by `layer_types`."""

    full: Sequence[Field]
    """The keys of layers with softmax attention."""
    linear: Sequence[Field]
    """The keys of the rest."""
    component: str = DELTA
    """The type of attention in the rest."""
    entry: str = LINEAR
    """Its entry of `layer_types`."""
    rule: Callable[[Config], Sequence[bool]] = each_nth_is_full
    """Returns which layers have softmax attention where there is no `layer_types`."""
    further: Sequence[str] = ("full_attention_interval",)
    """Keys that the rule reads."""

    @property
    def keys(self) -> Collection[str]:
        inner = (key for field in (*self.full, *self.linear) for key in field.keys)
        return ("layer_types", *self.further, *inner)

    @property
    def written(self) -> Collection[str]:
        """Without keys of layers that a model need not have."""
        return ("layer_types",)

    def layers(self, config: Config) -> Sequence[bool]:
        """Returns which layers have softmax attention."""
        types = config.get("layer_types")
        if types is None:
            return self.rule(config)
        if unknown := [entry for entry in types if entry not in (FULL, self.entry)]:
            raise Unsupported(f"layer_types has {unknown[0]!r}; Forge has {FULL!r}, {self.entry!r}")
        if len(types) != depth(config):
            raise Unsupported(f"layer_types has {len(types)} entries, where there are {depth(config)} layers")
        return [entry == FULL for entry in types]

    def read(self, config: Config) -> Flat:
        """Reads the keys of both kinds, and gives each layer those of its kind."""
        layers, kinds = self.layers(config), {True: self.full, False: self.linear}
        # Keys of a kind that no layer has may be missing
        tables = {
            full: {path: value for field in kinds[full] for path, value in field.read(config).items()}
            for full in dict.fromkeys(layers)
        }
        return merged([tables[full] for full in layers])

    def write(self, model: Flat) -> Config:
        """Writes the keys of the kinds that layers have, and the list."""
        layers = of_layers(model)
        full = [layer.get(TYPE) != self.component for layer in layers]
        config: dict[str, object] = {"layer_types": [FULL if each else self.entry for each in full]}
        for fields, chosen in ((self.linear, [not each for each in full]), (self.full, full)):
            if own := list(compress(layers, chosen)):
                alike = merged(own)
                for field in fields:
                    config |= field.write(alike)
        return config

    def resolve(self, model: Flat) -> Flat:
        """Returns what 0 stands for in a layer of its kind."""
        known = dict(model)
        for field in self.linear if model.get(TYPE) == self.component else self.full:
            known |= field.resolve(known)
        return {path: value for path, value in known.items() if path not in model or model[path] != value}


@frozen(kw_only=True)
class Qwen3Next(ArchitectureComponent):
    """Qwen3-Next-80B-A3B: norms whose gain is 1 + weight, gates behind attention, a shared expert behind one."""

    name = "Qwen3NextForCausalLM"
    harmless = ("output_router_logits", "router_aux_loss_coef")
    training_only = (*BALANCE, "attention.chunk")
    left_out = (*ArchitectureComponent.left_out, "mtp.*")

    def fields(self) -> Sequence[Field]:
        """Returns the keys; layers with softmax attention rotate a quarter of each head."""
        return (
            *hybrid_fields(Rope(share=0.25), kv_heads=2),
            # The class does not read it, and published files have it
            Only("use_sliding_window", False, "no layer of Qwen3-Next has a window"),
            *dense_layers(),
            *router_fields(default=True),
            *SHARED_EXPERT,
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; projections of theirs have their rows head by head."""
        layer = "model.layers.{layer}.mlp"
        attention = attention_rules(model, projections_by_head)
        experts = (*shared_expert_rules(layer), *expert_rules(layer))
        return (*ENDS, *NORMS, *attention, *FFN, *experts, *tied_head(model))


SHARED_EXPERT: Sequence[Field] = (Fixed({"ffn.shared_gate": True}), SharedWidth())
"""The keys of a shared expert behind a gate."""


def hybrid_fields(rope: Rope, *, kv_heads: int, of_rope: Flat | None = None) -> Sequence[Field]:
    """Returns the keys of everything but the feed-forward parts.

    Args:
        rope: the position encoding of layers with softmax attention.
        kv_heads: their heads of keys and values where no key gives them.
        of_rope: settings of the encoding that no key gives.
    """
    eps, offset = "rms_norm_eps", {"attention.qk_norm": True, "attention.qk_norm_offset": 1}
    gqa = attention_fields(head_dim=256, kv_heads=kv_heads, rope=rope)
    full = (
        *(field for field in gqa if not isinstance(field, Dropout)),
        all_biases(),
        Fixed({**offset, "attention.gate": "element", **(of_rope or {})}),
        Key(eps, "attention.qk_norm_eps", 1e-6),
    )
    linear = (
        Fixed({TYPE: DELTA}),
        *(Key(theirs, ours, DEFAULTS[theirs], derived=DERIVED.get(ours)) for theirs, ours in SETTINGS.items()),
        Key(eps, "attention.norm_eps", 1e-6),
    )
    return (
        *shape_fields(),
        Fixed({"norm.offset": 1}),
        Key(eps, "norm.eps", 1e-6),
        MixedLayers(full=full, linear=linear),
        Dropout("attention_dropout"),
    )


def shared_expert_rules(layer: str) -> Sequence[Rule]:
    """Returns the rules of the router, the shared expert and its gate below the name of a layer's part."""
    return (
        Same("layers.{layer}.ffn.router.weight", f"{layer}.gate.weight"),
        *(
            Same(f"layers.{{layer}}.ffn.shared.{ours}.weight", f"{layer}.shared_expert.{theirs}.weight")
            for ours, theirs in MATRICES.items()
        ),
        Same("layers.{layer}.ffn.shared_gate.weight", f"{layer}.shared_expert_gate.weight"),
    )


def attention_rules(model: Flat, projections: Callable[[Flat], Sequence[Rule]]) -> Sequence[Rule]:
    """Returns the rules of attention, layer by layer.

    Args:
        model: with layers of both kinds.
        projections: returns the rules of Gated DeltaNet's projections, of a layer.
    """
    return [
        in_layer(rule, number)
        for number, own in enumerate(of_layers(model))
        for rule in ((*projections(own), *delta_rules()) if own[TYPE] == DELTA else gated_rules(own))
    ]


def gated_rules(layer: Flat) -> Sequence[Rule]:
    """Returns the rules of a layer with softmax attention, whose gates stand beside the queries of each head."""
    both = [f"{OURS}.q.weight", f"{OURS}.gate.weight"]
    query = HeadRows(both, "model.layers.{layer}.self_attn.q_proj.weight", layer["attention.heads"])
    return (query, *named_alike(*(f"attention.{matrix}" for matrix in "kvo")), *QK_NORM)


def projections_by_head(layer: Flat) -> Sequence[Rule]:
    """Returns the rules of the projections of Gated DeltaNet, which are fused by heads of keys."""
    heads = layer["attention.key_heads"]
    large, small = (
        [f"{OURS}.{name}.weight" for name in names] for names in (("q", "k", "v", "gate"), ("beta", "step"))
    )
    return HeadRows(large, f"{THEIRS}.in_proj_qkvz.weight", heads), HeadRows(
        small, f"{THEIRS}.in_proj_ba.weight", heads
    )


def delta_rules() -> Sequence[Rule]:
    """Returns the rules of a layer with Gated DeltaNet, without its projections."""
    alike = {"log_rate.weight": "A_log", "offset.weight": "dt_bias", "norm.weight": "norm.weight"}
    return (
        FilterRows([f"{OURS}.{name}_conv.weight" for name in "qkv"], f"{THEIRS}.conv1d.weight"),
        *(Same(f"{OURS}.{ours}", f"{THEIRS}.{theirs}") for ours, theirs in alike.items()),
        Same(f"{OURS}.o.weight", f"{THEIRS}.out_proj.weight"),
    )


def in_layer(rule: Any, number: int) -> Rule:
    """Returns a rule for one layer: others have tensors of the same names for something else."""

    def of(template: str) -> str:
        return template.replace("{layer}", str(number))

    ours = of(rule.ours) if isinstance(rule.ours, str) else [*map(of, rule.ours)]
    return attrs.evolve(rule, ours=ours, theirs=of(rule.theirs))
