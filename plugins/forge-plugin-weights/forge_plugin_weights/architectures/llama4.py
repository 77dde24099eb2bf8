"""The language model of Llama 4: attention in chunks, layers without an encoding of positions, and experts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attrs import frozen

from forge_plugin_transformer.layer_parts import default_hidden
from forge_plugin_weights.architectures.dense import (
    ENDS,
    NORMS,
    all_biases,
    attention_fields,
    named_alike,
    rotated_in_pairs,
    shape_fields,
    tied_head,
)
from forge_plugin_weights.architectures.experts import BALANCE, MATRICES, MOE
from forge_plugin_weights.fields import Choice, Fixed, Key, Only, setting, value_of
from forge_plugin_weights.keys_by_layer import NO_ROPE, PerLayer, merged, of_layers
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule, Unsupported
from forge_plugin_weights.layer_fields import FULL, RopeOfSomeLayers, depth
from forge_plugin_weights.rules import Columns, Same, Transposed

CHUNKED = "chunked_attention"
"""An entry of `layer_types`."""
MASK, SIZE = "attention.mask.type", "attention.mask.chunk_size"
CAUSAL, CHUNKS = "forge-plugin-transformer/causal", "forge-plugin-transformer/chunked"
NORM, ROTATED, GAIN, EPS = (f"attention.qk_norm{end}" for end in ("", "_rotated", "_gain", "_eps"))
GROWTH, LENGTH, OFFSET = (f"attention.query_growth{end}" for end in ("", "_length", "_offset"))
FIRST, EVERY = "ffn.first_dense", "ffn.every"


@frozen(kw_only=True)
class RopeOfMostLayers(RopeOfSomeLayers):
    """The encoding, which every fourth layer is without unless `no_rope_layers` has entries."""

    def layers(self, config: Config) -> Sequence[bool]:
        """Returns which layers have the encoding; an empty list is as a missing one."""
        if config.get("no_rope_layers") == []:
            config = {key: value for key, value in config.items() if key != "no_rope_layers"}
        return super().layers(config)


ROPE = RopeOfMostLayers(theta=500000.0)


def encoded_layers(model: Flat) -> Sequence[bool]:
    """Returns which layers of a model encode positions."""
    return [layer.get("attention.rope.type") != NO_ROPE for layer in of_layers(model)]


@frozen
class Chunks(Field):
    """`attention_chunk_size`, and which layers have chunks: `layer_types`, or those that encode positions."""

    @property
    def keys(self) -> Collection[str]:
        return ("attention_chunk_size", "layer_types")

    def read(self, config: Config) -> Flat:
        """Reads the mask of each layer; raises `Unsupported` for chunks without their size."""
        size = config.get("attention_chunk_size", 8192)  # null: layers have no chunks
        types = config.get("layer_types")
        if types is None:
            types = [CHUNKED if encoded and size is not None else FULL for encoded in ROPE.layers(config)]
        if unknown := [entry for entry in types if entry not in (FULL, CHUNKED)]:
            raise Unsupported(f"layer_types has {unknown[0]!r}; Forge has {FULL!r}, {CHUNKED!r}")
        if len(types) != depth(config):
            raise Unsupported(f"layer_types has {len(types)} entries, where there are {depth(config)} layers")
        if CHUNKED in types and not size:
            raise Unsupported(f"layer_types has {CHUNKED!r}, and attention_chunk_size is {size!r}")
        return merged([{MASK: CHUNKS, SIZE: size} if entry == CHUNKED else {MASK: CAUSAL} for entry in types])

    def write(self, model: Flat) -> Config:
        """Writes `layer_types` always; raises `Unsupported` for other masks and for chunks of several sizes."""
        layers = of_layers(model)
        masks = [layer.get(MASK, CAUSAL) for layer in layers]
        if others := [mask for mask in masks if mask not in (CAUSAL, CHUNKS)]:
            raise Unsupported(f"{MASK} = {others[0]!r}; there are {CAUSAL!r}, {CHUNKS!r}")
        sizes = {layer[SIZE] for layer, mask in zip(layers, masks, strict=True) if mask == CHUNKS}
        if len(sizes) > 1:
            raise Unsupported(f"{SIZE} differs between layers: {sorted(sizes)}; chunks have one size")
        types = [CHUNKED if mask == CHUNKS else FULL for mask in masks]
        return {"attention_chunk_size": next(iter(sizes), None), "layer_types": types}


@frozen
class ByEncoding(Field):
    """What layers with an encoding of positions have, and what those without have.

    With `use_qk_norm`, the first normalise queries and keys behind the encoding, without a gain. With
    `attn_temperature_tuning`, queries of the others grow with the logarithm of their position.
    """

    @property
    def keys(self) -> Collection[str]:
        return ("use_qk_norm", "attn_temperature_tuning", "attn_scale", "floor_scale", "rms_norm_eps")

    def read(self, config: Config) -> Flat:
        """Reads the norm and the growth of each layer."""
        eps, length = value_of(config, "rms_norm_eps", 1e-5), value_of(config, "floor_scale", 8192)
        if length != int(length):
            raise Unsupported(f"floor_scale = {length!r}; a whole number works")
        norm: Flat = {NORM: False}
        if value_of(config, "use_qk_norm", True):
            norm = {NORM: True, ROTATED: True, GAIN: False, EPS: eps}
        growth: Flat = {GROWTH: 0.0}
        if value_of(config, "attn_temperature_tuning", True) and (rate := value_of(config, "attn_scale", 0.1)):
            growth = {GROWTH: rate, LENGTH: int(length), OFFSET: 1}
        layers = [{**norm, GROWTH: 0.0} if encoded else {NORM: False, **growth} for encoded in ROPE.layers(config)]
        return {"norm.eps": eps, **merged(layers)}

    def write(self, model: Flat) -> Config:
        """Writes both switches; raises `Unsupported` where layers have norm and growth otherwise."""
        eps, layers, encoded = setting(model, "norm.eps"), of_layers(model), encoded_layers(model)
        norms = {self._norm(layer, eps) for layer, own in zip(layers, encoded, strict=True) if own}
        if any(layer.get(NORM) for layer, own in zip(layers, encoded, strict=True) if not own) or len(norms) > 1:
            raise Unsupported(f"{NORM} differs from one in all layers that encode positions, and in no others")
        growths = {self._growth(layer) for layer, own in zip(layers, encoded, strict=True) if not own}
        if any(layer.get(GROWTH) for layer, own in zip(layers, encoded, strict=True) if own) or len(growths) > 1:
            raise Unsupported(f"{GROWTH} differs from one in all layers that encode no positions, and in no others")
        # Of what no layer has, the values of a missing key
        rate, length = next(iter(growths), (0.1, 8192))
        return {
            "rms_norm_eps": eps,
            "use_qk_norm": next(iter(norms), True),
            "attn_temperature_tuning": bool(rate),
            "attn_scale": rate or 0.1,
            "floor_scale": length,
        }

    def _norm(self, layer: Flat, eps: float) -> bool:
        """Whether a layer has the norm; raises `Unsupported` for another one."""
        if not layer.get(NORM):
            return False
        own = {path: layer.get(path) for path in (NORM, ROTATED, GAIN, EPS)}
        wanted = {NORM: True, ROTATED: True, GAIN: False, EPS: eps}
        if wrong := [path for path, value in wanted.items() if own[path] != value]:
            raise Unsupported(f"{wrong[0]} = {own[wrong[0]]!r}, where it is {wanted[wrong[0]]!r} always")
        return True

    def _growth(self, layer: Flat) -> tuple[float, int]:
        """Rate and length of a layer's growth; raises `Unsupported` for one that counts from another position."""
        if not layer.get(GROWTH):
            return 0.0, 8192
        if layer.get(OFFSET) != 1:
            raise Unsupported(f"{OFFSET} = {layer.get(OFFSET)!r}, where it is 1 always")
        return layer[GROWTH], layer[LENGTH]

    def resolve(self, model: Flat) -> Flat:
        """Keys of what a layer has not have their defaults, so that models are equal whatever they are."""
        unused: dict[str, Any] = {}
        if "layers" not in model:  # a larger model, to which an export compares every architecture
            return unused
        layers = of_layers(model)
        if any(NORM not in layer for layer in layers):
            return unused
        for switch, defaults in (
            (NORM, {ROTATED: False, GAIN: True, EPS: 1e-6}),
            (GROWTH, {LENGTH: 8192, OFFSET: 0}),
        ):
            own = [
                {path: layer.get(path, value) if layer.get(switch) else value for path, value in defaults.items()}
                for layer in layers
            ]
            unused |= merged(own)
        return unused


@frozen
class LayersOfExperts(Field):
    """`moe_layers`, or every n-th by `interleave_moe_layer_step`."""

    @property
    def keys(self) -> Collection[str]:
        return ("moe_layers", "interleave_moe_layer_step")

    def read(self, config: Config) -> Flat:
        """Reads a list that names every n-th layer from some layer on, the last of each n; refuses any other."""
        layers, step = depth(config), value_of(config, "interleave_moe_layer_step", 1)
        listed = config.get("moe_layers")
        if listed is None:
            listed = with_experts(layers, 0, step)
        if not listed:  # one form for all numbers that name no layer
            return {FIRST: layers, EVERY: 1}
        # A single layer is the last of a group, and no other group is whole
        periods = [listed[1] - listed[0]] if len(listed) > 1 else [step, layers - listed[0]]
        for every in periods:
            first = listed[0] - every + 1
            if every > 0 and first >= 0 and list(listed) == with_experts(layers, first, every):
                return {FIRST: first, EVERY: every}
        raise Unsupported(f"moe_layers = {listed}; every n-th layer from one on works, the last of each n")

    def write(self, model: Flat) -> Config:
        """Writes both keys, of which the list has precedence."""
        first, every = setting(model, FIRST), setting(model, EVERY)
        if isinstance(first, PerLayer) or isinstance(every, PerLayer):
            raise Unsupported(f"{FIRST} and {EVERY} differ between layers")
        return {"moe_layers": with_experts(setting(model, "layers"), first, every), "interleave_moe_layer_step": every}

    def resolve(self, model: Flat) -> Flat:
        """Returns the smallest numbers that name the same layers."""
        if not {FIRST, EVERY, "layers"} <= model.keys():
            return {}
        config = {"num_hidden_layers": model["layers"], **self.write(model)}
        return self.read(config)


def with_experts(layers: int, first: int, every: int) -> list[int]:
    """Returns which layers have experts."""
    return [*range(first + every - 1, layers, every)]


@frozen(kw_only=True)
class Llama4Text(ArchitectureComponent):
    """The language model of Llama 4 Scout and Maverick."""

    name = "Llama4ForCausalLM"
    harmless = ("output_router_logits", "router_aux_loss_coef", "for_llm_compressor")
    training_only = (*BALANCE, "ffn.router.bias_rate")

    def fields(self) -> Sequence[Field]:
        """Returns the keys; `intermediate_size` is the width of an expert, routed or shared."""
        router: Mapping[str, Any] = {"type": f"{MOE}/sigmoid_topk", "normalise": False, "correction_bias": False}
        return (
            *shape_fields(),
            *attention_fields(head_dim=128, kv_heads=8, rope=ROPE),
            all_biases(),
            Chunks(),
            ByEncoding(),
            Choice("hidden_act", {"silu": {"ffn.type": f"{MOE}/moe"}}, "silu", "experts are gated by silu"),
            Fixed({f"ffn.router.{key}": value for key, value in router.items()}),
            Fixed({"ffn.apply_router_weight_on_input": True, "ffn.shared_experts": 1}),
            Fixed({"ffn.dense.type": "forge-plugin-transformer/swiglu"}),
            Key("num_local_experts", "ffn.experts", 16),
            Key("num_experts_per_tok", "ffn.router.top_k", 1),
            Key("intermediate_size", "ffn.hidden", 8192, derived=lambda model: default_hidden(model["dim"])),
            Key("intermediate_size_mlp", "ffn.dense.hidden", 16384, derived=lambda model: default_hidden(model["dim"])),
            LayersOfExperts(),
            Only("router_jitter_noise", 0.0, "routers add no noise of this kind"),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; neighbours are rotated together, and experts' matrices are stacks of transposed ones."""
        ours, theirs = "layers.{layer}.ffn", "model.layers.{layer}.feed_forward"
        width = model["attention.head_dim"]
        turned = rotated_in_pairs(width)
        dense = (
            Same(f"{ours}{part}.{name}.weight", f"{theirs}{inner}.{matrix}.weight")
            for part, inner in (("", ""), (".shared", ".shared_expert"))
            for name, matrix in MATRICES.items()
        )
        experts = (
            Same(f"{ours}.router.weight", f"{theirs}.router.weight"),
            Columns([f"{ours}.experts.{name}.weight" for name in ("gate", "up")], f"{theirs}.experts.gate_up_proj"),
            Transposed(f"{ours}.experts.down.weight", f"{theirs}.experts.down_proj"),
        )
        attention = named_alike("attention.v", "attention.o")
        return (*ENDS, *NORMS, *turned, *attention, *dense, *experts, *tied_head(model))
