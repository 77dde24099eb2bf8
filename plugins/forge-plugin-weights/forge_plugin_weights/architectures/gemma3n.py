"""Gemma 3n without images and sounds: streams that layers predict and correct, and sparse feed-forward parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from attrs import frozen

from forge_plugin_transformer.layer_parts import default_hidden
from forge_plugin_weights.architectures.dense import (
    ATTENTION,
    ENDS,
    FFN,
    QK_NORM,
    all_biases,
    attention_fields,
    shape_fields,
    tied_head,
)
from forge_plugin_weights.architectures.gemma import ACTIVATIONS, EMBEDDING_SCALE, NORMS
from forge_plugin_weights.architectures.gemma4 import (
    FFN_WIDTH,
    INPUTS,
    LEFT_OUT,
    OF_WHOLES,
    VALUES_NORMED,
    PerLayerEmbeddings,
)
from forge_plugin_weights.fields import Choice, Fixed, Key, Only, Rope, value_of
from forge_plugin_weights.keys_by_layer import merged, of_layers
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule, Unsupported
from forge_plugin_weights.layer_fields import LayerWindows, RopeByWindow, depth, every_nth_is_full
from forge_plugin_weights.rules import Same

SPARSITY = "ffn.sparsity"
WINDOWS = LayerWindows(default=512, rule=every_nth_is_full(5))
LAYER = "layers.{layer}"
STREAMS: Sequence[Rule] = (
    *(
        Same(f"{LAYER}.{ours}", f"model.{LAYER}.{theirs}")
        for ours, theirs in {
            "altup.output_scale": "altup.correct_output_scale",
            "altup.correction": "altup.correction_coefs.weight",
            "altup.prediction": "altup.prediction_coefs.weight",
            "altup.router": "altup.modality_router.weight",
            "altup.norm.weight": "altup.router_norm.weight",
            "laurel.left.weight": "laurel.linear_left.weight",
            "laurel.right.weight": "laurel.linear_right.weight",
            "laurel.norm.weight": "laurel.post_laurel_norm.weight",
        }.items()
    ),
    Same("expansion.projections.{expert}.weight", "model.altup_projections.{expert}.weight"),
    Same("contraction.projections.{expert}.weight", "model.altup_unembed_projections.{expert}.weight"),
)


@frozen(kw_only=True)
class ByLayer(Field):
    """Width and sparsity of feed-forward parts, a number for each layer, or one for all."""

    @property
    def keys(self) -> Collection[str]:
        return ("intermediate_size", "activation_sparsity_pattern")

    def read(self, config: Config) -> Flat:
        """Reads both; without a pattern, the first ten layers of more than ten are sparse, as in transformers."""
        layers = depth(config)
        widths = value_of(config, "intermediate_size", 16384)
        sparse = value_of(config, "activation_sparsity_pattern", [0.95] * 10 + [0.0] * (layers - 10))
        if config.get("activation_sparsity_pattern") is None and layers <= 10:
            sparse = [0.0] * layers
        if not isinstance(sparse, list):
            raise Unsupported(f"activation_sparsity_pattern = {sparse!r}, and not a number for each layer")
        widths = widths if isinstance(widths, list) else [widths] * layers
        for key, values in (("intermediate_size", widths), ("activation_sparsity_pattern", sparse)):
            if len(values) != layers:
                raise Unsupported(f"{key} has {len(values)} entries, where there are {layers} layers")
        return merged([{FFN_WIDTH: w, SPARSITY: s} for w, s in zip(widths, sparse, strict=True)])

    def write(self, model: Flat) -> Config:
        """Writes a number for each layer."""
        layers = of_layers(model)
        if any(path not in layer for layer in layers for path in (FFN_WIDTH, SPARSITY)):
            raise Unsupported(f"there is no model.{SPARSITY} in all layers")
        pattern = [float(layer[SPARSITY]) for layer in layers]
        return {"intermediate_size": [layer[FFN_WIDTH] for layer in layers], "activation_sparsity_pattern": pattern}

    def resolve(self, model: Flat) -> Flat:
        """Returns the width that 0 stands for."""
        return {FFN_WIDTH: default_hidden(model["dim"])} if FFN_WIDTH in model and not model[FFN_WIDTH] else {}


@frozen(kw_only=True)
class Gemma3nText(ArchitectureComponent):
    """The language model of Gemma 3n: E2B and E4B."""

    name = "Gemma3nForCausalLM"
    left_out = LEFT_OUT
    renames: ClassVar[Mapping[str, str]] = OF_WHOLES
    defaults: ClassVar[Config] = {
        "vocab_size": 262400,
        "hidden_size": 2048,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
    }

    def fields(self) -> Sequence[Field]:
        """Returns the keys; without `layer_types`, every fifth layer has no window."""
        near = "rope_local_base_freq"
        rope = RopeByWindow(windows=WINDOWS, full=Rope(theta=1e6), near=Rope(theta=1e4), near_theta=near)
        return (
            *shape_fields(tied=True),
            Fixed({"norm_placement": "both"}),
            EMBEDDING_SCALE,
            *attention_fields(head_dim=256, kv_heads=2, rope=rope),
            all_biases(),
            WINDOWS,
            *VALUES_NORMED,
            Key("final_logit_softcapping", "logit_soft_cap", 30.0),
            Choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh", "geglu"),
            Fixed({"ffn.bias": False}),
            ByLayer(),
            Key("num_kv_shared_layers", "kv_shared_layers", 15),
            PerLayerEmbeddings(default=256, rows=262144),
            Key("altup_num_inputs", "altup.inputs", 4),
            Key("altup_active_idx", "altup.active", 0),
            Key("altup_coef_clip", "altup.coef_clip", 120.0),
            Only("altup_correct_scale", True, "the corrected stream is scaled always"),
            Key("laurel_rank", "laurel_rank", 64),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        return (*ENDS, *NORMS, *ATTENTION, *QK_NORM, *FFN, *INPUTS, *STREAMS, *tied_head(model))
