"""Nemotron and Arcee: feed-forward parts of two matrices with a squared ReLU."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from forge_plugin_weights.architectures.dense import (
    ATTENTION,
    ENDS,
    NORMS,
    TRANSFORMER,
    all_biases,
    attention_fields,
    named_alike,
    shape_fields,
    tied_head,
)
from forge_plugin_weights.fields import Choice, Fixed, Key, Rope
from forge_plugin_weights.kinds import ArchitectureComponent, Field, Flat, Rule
from forge_plugin_weights.rules import Same

PLAIN_FFN = named_alike("ffn.up", "ffn.down")


def squared_relu_fields() -> Sequence[Field]:
    """Returns the keys of the feed-forward part."""
    return (
        Choice("hidden_act", {"relu2": {"ffn.type": f"{TRANSFORMER}/relu2"}}, "relu2", "the square of relu"),
        Key("mlp_bias", "ffn.bias", False),
        Key("intermediate_size", "ffn.hidden", derived=lambda model: 4 * model["dim"]),
    )


@frozen(kw_only=True)
class Arcee(ArchitectureComponent):
    """AFM-4.5B: a Llama with a squared ReLU."""

    name = "ArceeForCausalLM"
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

    def rules(self, model: Flat) -> Sequence[Rule]:
        return (*ENDS, *NORMS, *ATTENTION, *PLAIN_FFN, *tied_head(model))


@frozen(kw_only=True)
class Nemotron(ArchitectureComponent):
    """Nemotron 3 8B, Nemotron 4 15B and 340B, Minitron: layer norms whose gain is 1 + weight."""

    name = "NemotronForCausalLM"
    harmless = ("kv_channels",)  # the width of a head once more, which the class does not read

    def fields(self) -> Sequence[Field]:
        """Returns the keys; half of each head is rotated, where no key gives a share."""
        return (
            Fixed({"type": f"{TRANSFORMER}/transformer", "norm.type": f"{TRANSFORMER}/layernorm", "norm.offset": 1}),
            *shape_fields()[1:],
            Fixed({"attention.qk_norm": False}),
            *attention_fields(rope=Rope(share=0.5)),
            all_biases(),
            *squared_relu_fields(),
            Key("norm_eps", "norm.eps", 1e-5),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; norms have biases."""
        norms = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
        return (
            *ENDS[::2],
            Same("norm.{tensor}", "model.norm.{tensor}"),
            *(
                Same(f"layers.{{layer}}.{ours}.{{tensor}}", f"model.layers.{{layer}}.{theirs}.{{tensor}}")
                for ours, theirs in norms.items()
            ),
            *ATTENTION,
            *PLAIN_FFN,
            *tied_head(model),
        )
