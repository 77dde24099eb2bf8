"""What Forge, or a configuration, cannot express of Falcon-H1 is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from forge_core.contracts.components import ModelComponent
from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import parse_component
from forge_plugin_transformer import GroupedQueryAttention
from forge_plugin_weights.architectures.falcon_h1 import FalconH1
from forge_plugin_weights.tables import read_config, write_config
from forge_testing.refusals import naming

CATALOG = Catalog.installed()
CONFIGS = json.loads(Path(__file__).with_name("published_configs.json").read_text())
SMALLEST = CONFIGS["tiiuae/Falcon-H1-0.5B-Base, some keys"]


def model(**keys: Any) -> Any:
    return parse_component(read_config(FalconH1(), {**SMALLEST, **keys}), "config.json", ModelComponent, CATALOG)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"mamba_d_head": 32}, ("mamba_d_head = 32", "1536")),
        ({"mamba_d_ssm": None}, ("mamba_d_head = 64", "2048")),
        ({"projectors_bias": True}, ("projectors_bias", "mamba_proj_bias")),
        ({"key_multiplier": 0.0}, ("key_multiplier = 0.0",)),
        ({"ssm_in_multiplier": -1.0}, ("ssm_in_multiplier = -1.0",)),
        ({"ssm_multipliers": [1.0] * 4}, ("ssm_multipliers", "4", "5")),
        ({"mlp_multipliers": [1.0, 0.0]}, ("mlp_multipliers = 0.0",)),
        ({"mamba_use_mlp": False}, ("mamba_use_mlp",)),
        ({"attn_layer_indices": [1]}, ("attn_layer_indices",)),
        ({"hidden_act": "gelu"}, ("hidden_act", "silu")),
        ({"novelty": 1}, ("novelty",)),
    ],
)
def test_a_configuration_with_other_parts_is_refused(keys: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(JobError, match=naming(*named)):
        model(**keys)


def test_a_model_that_a_configuration_cannot_express_is_refused() -> None:
    falcon = model()
    mixers = falcon.attention.mixers

    def refused(*named: str, **changed: Any) -> None:
        other = attrs.evolve(falcon.attention, mixers={**mixers, **changed})
        with pytest.raises(JobError, match=naming(*named)):
            write_config(FalconH1(), attrs.evolve(falcon, attention=other), CATALOG)

    refused("mamba2", mamba=GroupedQueryAttention(heads=8))
    refused("window", full=attrs.evolve(mixers["full"], window=8))
    refused("norm_groups", mamba=attrs.evolve(mixers["mamba"], groups=3, norm="before", norm_groups=1))
    with pytest.raises(JobError, match=naming("attention.type", "parallel")):
        write_config(FalconH1(), attrs.evolve(falcon, attention=mixers["full"]), CATALOG)


def test_factors_that_a_job_leaves_out_are_one() -> None:
    falcon = model()
    plain = attrs.evolve(falcon.attention, scales={}, input_scales={"mamba": 1.25})
    written = write_config(FalconH1(), attrs.evolve(falcon, attention=plain), CATALOG)
    assert [written[f"{name}_multiplier"] for name in ("attention_in", "attention_out", "ssm_in", "ssm_out")] == [
        *(1.0, 1.0, 1.25, 1.0)
    ]
    default = attrs.evolve(falcon.attention.mixers["full"], scale=0.0)
    plain = attrs.evolve(plain, mixers={**falcon.attention.mixers, "full": default})
    assert write_config(FalconH1(), attrs.evolve(falcon, attention=plain), CATALOG)["key_multiplier"] == 1.0
