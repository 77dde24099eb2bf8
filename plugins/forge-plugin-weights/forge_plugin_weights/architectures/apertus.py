"""Apertus: feed-forward parts of two matrices, between which an activation with learned slopes stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from forge_plugin_weights.architectures.dense import (
    ATTENTION,
    ENDS,
    QK_NORM,
    TRANSFORMER,
    all_biases,
    attention_fields,
    shape_fields,
    tied_head,
)
from forge_plugin_weights.architectures.nemotron import PLAIN_FFN
from forge_plugin_weights.fields import ORIGINAL, Choice, Dropout, Fixed, Key, Only, Rope
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule, Unsupported
from forge_plugin_weights.rules import Same

MISSING: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    ORIGINAL: 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""`rope_parameters` where a configuration has no key of the position encoding."""


@frozen(kw_only=True)
class StretchedRope(Rope):
    """The position encoding, which is stretched unless a key gives another."""

    def read(self, config: Config) -> Flat:
        """Reads the table of the class where there is none.

        Raises:
            Unsupported: there is a base and no table, to which versions 4 and 5 of `transformers` give another meaning.
        """
        # An empty table is one of version 5, without a form
        if config.get("rope_scaling") or config.get("rope_parameters") is not None:
            return super().read(config)
        if (base := config.get(self.theta_key)) is not None:
            message = (
                f"{self.theta_key} = {base} without rope_parameters is stretched by version 5 of transformers alone"
            )
            raise Unsupported(f"{message}; add rope_parameters, with rope_type")
        return super().read({**config, "rope_parameters": MISSING})


@frozen(kw_only=True)
class Apertus(ArchitectureComponent):
    """Apertus 8B and 70B."""

    name = "ApertusForCausalLM"

    def fields(self) -> Sequence[Field]:
        """Returns the keys; those with one value describe what the class always has."""
        only = {"mlp_bias": False, "post_norm": False, "qk_norm": True}
        return (
            *shape_fields(),
            *attention_fields(rope=StretchedRope(theta=12e6)),
            all_biases(),
            Fixed({"attention.qk_norm": True}),
            Choice("hidden_act", {"xielu": {"ffn.type": f"{TRANSFORMER}/xielu"}}, "xielu", "xielu"),
            Key("intermediate_size", "ffn.hidden", derived=lambda model: 4 * model["dim"]),
            *(Only(key, value, "the class has no other", write_it=False) for key, value in only.items()),
            Dropout("hidden_dropout"),
            Key("rms_norm_eps", ("norm.eps", "attention.qk_norm_eps"), 1e-5),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; norms have other names than Llama's."""
        layer = "model.layers.{layer}"
        norms = {"attention_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
        slopes = ("alpha_p", "alpha_n", "beta", "eps")
        return (
            *ENDS,
            *(Same(f"layers.{{layer}}.{ours}.weight", f"{layer}.{theirs}.weight") for ours, theirs in norms.items()),
            *ATTENTION,
            *QK_NORM,
            *PLAIN_FFN,
            *(Same(f"layers.{{layer}}.ffn.act.{name}", f"{layer}.mlp.act_fn.{name}") for name in slopes),
            *tied_head(model),
        )
