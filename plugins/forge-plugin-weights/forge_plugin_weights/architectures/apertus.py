"""Apertus: feed-forward parts of two matrices, between which an activation with learned slopes stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from forge_plugin_weights.architectures.dense import (
    EPS_OF_ALL,
    QK_NORM,
    TRANSFORMER,
    Dense,
    all_biases,
    attention_fields,
    renamed,
    shape_fields,
)
from forge_plugin_weights.architectures.nemotron import PLAIN_FFN
from forge_plugin_weights.fields import ORIGINAL, Choice, Dropout, Fixed, Key, Only, Rope
from forge_plugin_weights.kinds import Field
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
SLOPES = [
    Same(f"layers.{{layer}}.ffn.act.{name}", f"model.layers.{{layer}}.mlp.act_fn.{name}")
    for name in ("alpha_p", "alpha_n", "beta", "eps")
]


@frozen(kw_only=True)
class Apertus(Dense):
    """Apertus 8B and 70B."""

    name = "ApertusForCausalLM"
    norms = renamed({"attention_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"})
    qk_norm = QK_NORM
    ffn = (*PLAIN_FFN, *SLOPES)

    def fields(self) -> Sequence[Field]:
        """Returns the keys; those with one value describe what the class always has."""
        only = {"mlp_bias": False, "post_norm": False, "qk_norm": True}
        return (
            *shape_fields(),
            *attention_fields(rope=Rope(theta=12e6, missing=MISSING)),
            all_biases(),
            Fixed({"attention.qk_norm": True}),
            Choice("hidden_act", {"xielu": {"ffn.type": f"{TRANSFORMER}/xielu"}}, "xielu", "xielu"),
            Key("intermediate_size", "ffn.hidden", derived=lambda model: 4 * model["dim"]),
            *(Only(key, value, "the class has no other", write_it=False) for key, value in only.items()),
            Dropout("hidden_dropout"),
            Key("rms_norm_eps", EPS_OF_ALL, 1e-5),
        )
