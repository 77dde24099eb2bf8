"""Nemotron and Arcee: feed-forward parts of two matrices with a squared ReLU."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from forge_plugin_weights.architectures.dense import (
    ENDS_WITH_BIAS,
    TRANSFORMER,
    Dense,
    all_biases,
    attention_fields,
    named_alike,
    shape_fields,
)
from forge_plugin_weights.fields import Choice, Fixed, Key, Rope
from forge_plugin_weights.kinds import Field

PLAIN_FFN = named_alike("ffn.up", "ffn.down")


def squared_relu_fields() -> Sequence[Field]:
    """Returns the keys of the feed-forward part."""
    return (
        Choice("hidden_act", {"relu2": {"ffn.type": f"{TRANSFORMER}/relu2"}}, "relu2", "the square of relu"),
        Key("mlp_bias", "ffn.bias", False),
        Key("intermediate_size", "ffn.hidden", derived=lambda model: 4 * model["dim"]),
    )


@frozen(kw_only=True)
class Arcee(Dense):
    """AFM-4.5B: a Llama with a squared ReLU."""

    name = "ArceeForCausalLM"
    ffn = PLAIN_FFN
    harmless = ("pretraining_tp",)

    def fields(self) -> Sequence[Field]:
        return (
            *shape_fields(),
            Fixed({"attention.qk_norm": False}),
            *attention_fields(),
            all_biases(),
            *squared_relu_fields(),
            Key("rms_norm_eps", "norm.eps", 1e-5),
        )


@frozen(kw_only=True)
class Nemotron(Dense):
    """Nemotron 3 8B, Nemotron 4 15B and 340B, Minitron: layer norms whose gain is 1 + weight."""

    name = "NemotronForCausalLM"
    ends = ENDS_WITH_BIAS
    ffn = PLAIN_FFN
    harmless = ("kv_channels",)  # the width of a head once more, which the class does not read

    def fields(self) -> Sequence[Field]:
        """Returns the keys; half of each head is rotated, where no key gives a share."""
        return (
            *shape_fields(norm="layernorm"),
            Fixed({"norm.offset": 1, "attention.qk_norm": False}),
            *attention_fields(rope=Rope(share=0.5)),
            all_biases(),
            *squared_relu_fields(),
            Key("norm_eps", "norm.eps", 1e-5),
        )
