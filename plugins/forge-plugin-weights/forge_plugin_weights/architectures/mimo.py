"""MiMo-V2-Flash: values narrower than keys, and sinks and twice the shared heads in layers with a window."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

from forge_plugin_weights.architectures.deepseek import MLP_TYPES, TRAINING_ONLY, DenseLayers, layer_rules, moe_fields
from forge_plugin_weights.architectures.dense import (
    ATTENTION,
    ENDS,
    QKV_BIASES,
    attention_fields,
    shape_fields,
    tied_head,
)
from forge_plugin_weights.architectures.gemma4 import RopeByType
from forge_plugin_weights.fields import ROPES, Choice, Fixed, Key, Only, Rope, value_of
from forge_plugin_weights.keys_by_layer import merged, of_layers
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule, Unsupported
from forge_plugin_weights.layer_fields import FULL, SLIDING, LayerWindows, depth, windows_of
from forge_plugin_weights.rules import Same

KV_HEADS, SINKS = "attention.kv_heads", "attention.sinks"
SIZE = "sliding_window_size"
SHARE = 0.334
ENCODING = Rope(share=SHARE, types={"default": ROPES["default"]})
ENCODINGS: Mapping[str, Mapping[str, Any]] = {
    FULL: {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": SHARE},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": SHARE},
}
"""`rope_parameters` where the configuration has none."""


@frozen(kw_only=True)
class WindowsByPattern(LayerWindows):
    """`sliding_window`, or `sliding_window_size` of published files, which does not count the position itself."""

    @property
    def keys(self) -> Collection[str]:
        return (*super().keys, SIZE)

    @property
    def written(self) -> Collection[str]:
        """Without the published key, which would have precedence."""
        return super().keys

    def width(self, config: Config) -> int:
        """Returns the window, the position itself included."""
        size = config.get(SIZE)
        return super().width(config) if size is None else size + 1

    def write(self, model: Flat) -> Config:
        """Writes no width where there is no window: the class takes a number always."""
        return {key: value for key, value in super().write(model).items() if value is not None}


def windowed(config: Config) -> Sequence[bool]:
    """Returns which layers have a window if no list specifies them: all but the first and each sixth."""
    return [layer > 0 and (layer + 1) % 6 != 0 for layer in range(depth(config))]


WINDOWS = WindowsByPattern(default=129, rule=windowed)


@frozen
class HeadsAndSinks(Field):
    """`num_key_value_heads`, of which layers with a window have twice as many, and those layers' sinks."""

    @property
    def keys(self) -> Collection[str]:
        return ("num_key_value_heads",)

    def read(self, config: Config) -> Flat:
        """Reads heads and sinks of each layer."""
        heads = value_of(config, "num_key_value_heads", 4)
        return merged([{KV_HEADS: heads * (1 + near), SINKS: near} for near in WINDOWS.layers(config)])

    def write(self, model: Flat) -> Config:
        """Writes the number of layers without a window; raises `Unsupported` where layers differ otherwise."""
        found = set()
        for window, layer in zip(windows_of(model), of_layers(model), strict=True):
            near, heads = bool(window), layer.get(KV_HEADS) or layer.get("attention.heads")
            if layer.get(SINKS) != near:
                raise Unsupported(f"{SINKS} = {layer.get(SINKS)!r}, where they are in layers with a window alone")
            if heads is None or (near and heads % 2):
                raise Unsupported(f"{KV_HEADS} = {heads!r}, where layers with a window have an even number")
            found.add(heads // (1 + near))
        if len(found) > 1:
            raise Unsupported(f"{KV_HEADS} is not twice as large in layers with a window as in those without")
        return {"num_key_value_heads": found.pop()}

    def resolve(self, model: Flat) -> Flat:
        """Returns the number that 0 stands for."""
        return {KV_HEADS: model["attention.heads"]} if KV_HEADS in model and not model[KV_HEADS] else {}


@frozen
class ValueWidth(Key):
    """The width of values, at most the width of keys."""

    def read(self, config: Config) -> Flat:
        """Reads the width; raises `Unsupported` for one that kernels do not take."""
        width, keys = value_of(config, self.theirs, self.default), value_of(config, "head_dim", 192)
        if width > keys:
            raise Unsupported(f"{self.theirs} = {width}; values as wide as keys work (head_dim = {keys})")
        return super().read(config)


@frozen
class DenseFirst(DenseLayers):
    """`mlp_layer_types`, whose dense layers come first."""

    @property
    def keys(self) -> Collection[str]:
        return (MLP_TYPES,)

    def write(self, model: Flat) -> Config:
        return {MLP_TYPES: super().write(model)[MLP_TYPES]}


@frozen
class Agrees(Field):
    """A key of published files that repeats what other keys have, or what the class has always; it is not written."""

    theirs: str
    value: Callable[[Config], Any]

    @property
    def keys(self) -> Collection[str]:
        return (self.theirs,)

    @property
    def written(self) -> Collection[str]:
        return ()

    def read(self, config: Config) -> Flat:
        """Raises `Unsupported` for another value than the rest of the configuration has; null is as missing."""
        given, needed = config.get(self.theirs), self.value(config)
        if given is not None and given != needed:
            raise Unsupported(f"{self.theirs} = {given!r}, where other keys have {needed!r}")
        return {}


DENSE = DenseFirst(1)


def with_experts(config: Config) -> Sequence[int]:
    """Returns a 1 for each layer with experts, and a 0 for each dense one."""
    first = DENSE.read(config)["ffn.first_dense"]
    return [int(layer >= first) for layer in range(depth(config))]


def tables_of(config: Config) -> Mapping[str, Mapping[str, Any]]:
    """Returns the position encodings by the type of layers."""
    return {**ENCODINGS, **(config.get("rope_parameters") or {})}


def share_of(config: Config) -> Any:
    """Returns the share of a head that is rotated; of several, all of them."""
    shares = [table.get("partial_rotary_factor", SHARE) for table in tables_of(config).values()]
    return shares[0] if len({*shares}) == 1 else shares


def theta_of(config: Config, type_: str) -> Any:
    """Returns the base of a type of layers."""
    return tables_of(config)[type_].get("rope_theta")


REPEATED: Mapping[str, Callable[[Config], Any]] = {
    "hybrid_layer_pattern": lambda config: [*map(int, WINDOWS.layers(config))],
    "moe_layer_freq": with_experts,
    "swa_num_attention_heads": lambda config: config["num_attention_heads"],
    "swa_num_key_value_heads": lambda config: 2 * value_of(config, "num_key_value_heads", 4),
    "swa_head_dim": lambda config: value_of(config, "head_dim", 192),
    "swa_v_head_dim": lambda config: value_of(config, "v_head_dim", 128),
    "add_swa_attention_sink_bias": lambda config: True,
    "add_full_attention_sink_bias": lambda config: False,
    # Of windows alone, as the blocks of no layer are others
    "attention_chunk_size": lambda config: WINDOWS.width(config) - 1,
    "hybrid_block_size": lambda config: None,
    "layernorm_epsilon": lambda config: value_of(config, "rms_norm_eps", 1e-5),
    "rope_theta": lambda config: theta_of(config, FULL),
    "swa_rope_theta": lambda config: theta_of(config, SLIDING),
    "partial_rotary_factor": share_of,
}
"""Keys that the class of `transformers` does not read, and what they have to be."""


@frozen(kw_only=True)
class MiMoV2Flash(ArchitectureComponent):
    """MiMo-V2-Flash, without its blocks of multi-token prediction."""

    name = "MiMoV2FlashForCausalLM"
    harmless = ("output_router_logits",)
    training_only = TRAINING_ONLY
    left_out = (*ArchitectureComponent.left_out, "model.mtp.*")
    renames: ClassVar[Mapping[str, str]] = {r"\.self_attn\.sinks$": ".self_attn.attention_sink_bias"}

    def fields(self) -> Sequence[Field]:
        """Returns the keys; there are no shared experts."""
        dropped = {"num_key_value_heads", "first_k_dense_replace", "n_shared_experts"}
        experts = moe_fields(scaling=1.0, groups=1, top_groups=1)
        encodings = RopeByType(windows=WINDOWS, encoding=ENCODING, defaults=ENCODINGS)
        every = (*attention_fields(head_dim=192, rope=encodings), *experts)
        return (
            *shape_fields(),
            *(each for each in every if not dropped & {*each.keys}),
            WINDOWS,
            HeadsAndSinks(),
            ValueWidth("v_head_dim", "attention.v_head_dim", 128, lambda model: model["attention.head_dim"]),
            Key("attention_value_scale", "attention.value_scale", 0.707, null=1.0),
            Choice("attention_bias", QKV_BIASES, False),
            Fixed({"attention.qk_norm": False, "ffn.every": 1, "ffn.shared_experts": 0}),
            DENSE,
            Only("rope_scaling", None, "no encoding is stretched", write_it=False),
            Only("n_shared_experts", 0, "the class has none", also=(None,), write_it=False),
            Only("scoring_func", "sigmoid", "the router is sigmoid_topk", write_it=False),
            Only("topk_method", "noaux_tc", "groups are chosen by their two largest scores", write_it=False),
            *(Agrees(key, value) for key, value in REPEATED.items()),
            Key("rms_norm_eps", "norm.eps", 1e-5),
        )

    def repeated(self, config: Config) -> Config:
        """Returns the keys of published files; shares that differ between layers have none there."""
        near = {SIZE: WINDOWS.width(config) - 1} if any(WINDOWS.layers(config)) else {}
        keys = {key: value(config) for key, value in REPEATED.items() if near or key != "attention_chunk_size"}
        if isinstance(keys["partial_rotary_factor"], list):
            del keys["partial_rotary_factor"]
        return {**keys, **near, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; sinks have the name of published files, which `transformers` writes, too."""
        sinks = Same("layers.{layer}.attention.sinks.weight", "model.layers.{layer}.self_attn.attention_sink_bias")
        return (*ENDS, *layer_rules([*ATTENTION, sinks]), *tied_head(model))
