"""Ministral 3 and Devstral 2: queries that grow with the logarithm of their position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

from forge_plugin_weights.architectures.dense import (
    PLAIN,
    Dense,
    attention_fields,
    dense_fields,
)
from forge_plugin_weights.fields import ORIGINAL, Rope, setting
from forge_plugin_weights.kinds import Config, Field, Flat, Unsupported
from forge_plugin_weights.layer_fields import Window

BETA = "llama_4_scaling_beta"
GROWTH, LENGTH = "attention.query_growth", "attention.query_growth_length"
MISSING: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}
"""`rope_parameters` where a configuration has none."""


@frozen(kw_only=True)
class GrowingRope(Rope):
    """The position encoding, in whose table the growth of queries is, too: by its original length."""

    def read(self, config: Config) -> Flat:
        """Reads the table and the two numbers in it."""
        config = self.completed(config)
        tables = {key: dict(config[key]) for key in ("rope_scaling", "rope_parameters") if config.get(key)}
        betas = [table.pop(BETA, None) for table in tables.values()]
        for table in tables.values():
            table.pop("max_position_embeddings", None)  # a copy of the key beside it
        first = next(iter(tables.values()))
        if any(beta is None for beta in betas) or len({*betas}) > 1 or first.get(ORIGINAL) is None:
            message = f"{' and '.join(tables)} must have {BETA} and {ORIGINAL}, which the class multiplies queries by"
            raise Unsupported(message)
        length = first[ORIGINAL]
        known = self.types.get(first.get("rope_type", first.get("type", "default")))
        if known is None or ORIGINAL not in known.keys:
            for table in tables.values():
                table.pop(ORIGINAL, None)
        return {**super().read({**config, **tables}), GROWTH: betas[0], LENGTH: length}

    def write(self, model: Flat) -> Config:
        """Writes both numbers into the table of either form; raises `Unsupported` where the encoding has others."""
        config = dict(super().write(model))
        own = {BETA: setting(model, GROWTH), ORIGINAL: setting(model, LENGTH)}
        path = f"{self.path}.{ORIGINAL}"
        # `dynamic` takes the length beside the table, so that there are two
        dynamic = model.get(f"{self.path}.type") == self.types["dynamic"].component
        if not dynamic and model.get(path, own[ORIGINAL]) != own[ORIGINAL]:
            raise Unsupported(f"{LENGTH} = {own[ORIGINAL]}, where {path} = {model[path]}; they are one number there")
        parameters = {**config["rope_parameters"], **own}
        scaling = {key: value for key, value in parameters.items() if key != self.theta_key}
        return {**config, "rope_scaling": scaling, "rope_parameters": parameters}


@frozen(kw_only=True)
class Ministral3(Dense):
    """Ministral 3 3B to 14B and Devstral 2, without their tower."""

    name = "Ministral3ForCausalLM"
    seldom = True  # without growth, its models are Mistral's, too
    defaults: ClassVar[Config] = {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }

    def fields(self) -> Sequence[Field]:
        """Returns the keys of Mistral, with another position encoding."""
        attention = attention_fields(head_dim=128, kv_heads=8, rope=GrowingRope(theta=1e6, missing=MISSING))
        return dense_fields(attention, PLAIN, Window(), eps=1e-5)
