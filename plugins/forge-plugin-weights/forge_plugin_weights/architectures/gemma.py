"""Gemma 1, 2 and 3, the last without images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from attrs import frozen

from forge_plugin_transformer.layer_parts import default_hidden
from forge_plugin_weights.architectures.dense import (
    QK_NORM,
    TRANSFORMER,
    Dense,
    all_biases,
    attention_fields,
    renamed,
    shape_fields,
)
from forge_plugin_weights.fields import REQUIRED, Choice, Converted, Fixed, Follows, Key, Only, OrNone, Rope, value_of
from forge_plugin_weights.kinds import Config, Field, Flat
from forge_plugin_weights.layer_fields import LayerWindows, RopeByWindow, every_nth_is_full

NORMS = renamed(
    {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
    }
)
ACTIVATIONS: Mapping[str, Flat] = {
    theirs: {"ffn.type": f"{TRANSFORMER}/geglu", "ffn.approximate": ours}
    for theirs, ours in (("gelu_pytorch_tanh", "tanh"), ("gelu", "none"))
}
HARMLESS = ("hidden_act", "cache_implementation", "sliding_window_size", "_sliding_window_pattern")
"""The first is another name of `hidden_activation` that nothing reads; the last two are of old files, likewise."""


def width_root(config: Config) -> float:
    """Returns the square root of the width."""
    return float(value_of(config, "hidden_size", REQUIRED) ** 0.5)


EMBEDDING_SCALE = Follows("embedding_scale", width_root, lambda model: model["dim"] ** 0.5)
"""No key has this factor: it is the root of the width always."""


def gemma_fields(windows: LayerWindows, rope: Field, *, caps: tuple[float | None, float | None]) -> Sequence[Field]:
    """Returns the keys of both.

    Args:
        windows: which layers have a window.
        rope: the position encoding.
        caps: defaults of the bounds of scores and of logits.
    """
    return (
        *shape_fields(tied=True),
        Fixed({"norm_placement": "both", "norm.offset": 1}),  # files hold the gains of norms less 1
        EMBEDDING_SCALE,
        *attention_fields(head_dim=256, kv_heads=4, rope=rope),
        all_biases(),
        Converted(
            "query_pre_attn_scalar",
            "attention.scale",
            lambda scalar: scalar**-0.5,
            lambda scale: scale**-2,
            default=256,
            derived=lambda model: model["attention.head_dim"] ** -0.5,
        ),
        windows,
        OrNone("attn_logit_softcapping", "attention.soft_cap", caps[0]),
        OrNone("final_logit_softcapping", "logit_soft_cap", caps[1]),
        Only("use_bidirectional_attention", False, "attention is causal", also=(None,)),
        Choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh", "geglu"),
        Fixed({"ffn.bias": False}),
        Key("intermediate_size", "ffn.hidden", derived=lambda model: default_hidden(model["dim"])),
    )


@frozen(kw_only=True)
class Gemma(Dense):
    """Gemma 1: norms before attention and feed-forward part alone, and no bound of scores or logits."""

    name = "GemmaForCausalLM"
    harmless = ("cache_implementation",)
    defaults: ClassVar[Config] = {
        "vocab_size": 256000,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_hidden_layers": 28,
    }

    def fields(self) -> Sequence[Field]:
        # "gelu" is a slip of the first files, and was the approximation by tanh always.
        activations = dict.fromkeys(("gelu_pytorch_tanh", "gelu"), ACTIVATIONS["gelu_pytorch_tanh"])
        return (
            *shape_fields(tied=True),
            Fixed({"norm.offset": 1}),  # files hold the gains of norms less 1
            EMBEDDING_SCALE,
            *attention_fields(head_dim=256, kv_heads=16),
            all_biases(),
            Only("use_bidirectional_attention", False, "attention is causal", also=(None,)),
            Choice("hidden_act", activations, "gelu_pytorch_tanh", "geglu"),
            Only("hidden_activation", "gelu_pytorch_tanh", "hidden_act sets it", also=(None,), write_it=False),
            Fixed({"ffn.bias": False}),
            Key("intermediate_size", "ffn.hidden", derived=lambda model: default_hidden(model["dim"])),
            Key("rms_norm_eps", "norm.eps", 1e-6),
        )


@frozen(kw_only=True)
class Gemma2(Dense):
    """Gemma 2: scores and logits are bounded, and every other layer has a window."""

    name = "Gemma2ForCausalLM"
    norms = NORMS
    harmless = HARMLESS

    def fields(self) -> Sequence[Field]:
        """Returns the keys; without `layer_types`, layers 0, 2, 4, … have a window."""
        windows = LayerWindows(default=4096, rule=every_nth_is_full(2))
        return (*gemma_fields(windows, Rope(), caps=(50.0, 30.0)), Key("rms_norm_eps", "norm.eps", 1e-6))


@frozen(kw_only=True)
class Gemma3Text(Dense):
    """Gemma 3, or its language model: five of six layers have a window, and a separate base of positions."""

    name = "Gemma3ForCausalLM"
    norms = NORMS
    qk_norm = QK_NORM
    harmless = HARMLESS
    defaults: ClassVar[Config] = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}

    def fields(self) -> Sequence[Field]:
        """Returns the keys; without `layer_types`, every sixth layer or `sliding_window_pattern`-th is full."""
        pattern = "sliding_window_pattern"
        windows = LayerWindows(default=4096, rule=every_nth_is_full(pattern, 6), further=(pattern,))
        rope = RopeByWindow(
            windows=windows, full=Rope(theta=1e6), near=Rope(theta=1e4), near_theta="rope_local_base_freq"
        )
        return (
            *gemma_fields(windows, rope, caps=(None, None)),
            Fixed({"attention.qk_norm": True, "attention.qk_norm_offset": 1}),
            Key("rms_norm_eps", ("norm.eps", "attention.qk_norm_eps"), 1e-6),
        )
