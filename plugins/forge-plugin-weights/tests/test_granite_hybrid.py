"""What Forge, or a configuration, cannot express of Granite 4 and Bamba is refused by name."""

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
from forge_plugin_linear_attention import Mamba2
from forge_plugin_weights.architectures.bamba import Bamba
from forge_plugin_weights.architectures.granite_hybrid import GraniteHybrid
from forge_plugin_weights.tables import read_config, write_config
from forge_testing.refusals import naming

CATALOG = Catalog.installed()
CONFIGS = json.loads(Path(__file__).with_name("published_configs.json").read_text())
SMALL = CONFIGS["ibm-granite/granite-4.0-h-350m, some keys"]
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 512}


def model(**keys: Any) -> Any:
    return parse_component(read_config(GraniteHybrid(), {**SMALL, **keys}), "config.json", ModelComponent, CATALOG)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"mamba_d_head": 64}, ("mamba_d_head = 64", "32")),
        ({**EXPERTS, "shared_intermediate_size": 768}, ("768", "intermediate_size = 512")),
        ({"layer_types": ["mamba", "conv"] * 16}, ("conv", "linear_attention")),
        ({"hidden_act": "gelu"}, ("hidden_act", "silu")),
    ],
)
def test_a_configuration_with_other_parts_is_refused(keys: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(JobError, match=naming(*named)):
        model(**keys)


def test_a_model_that_a_configuration_cannot_express_is_refused() -> None:
    heads = Mamba2(heads=6, head_dim=100)
    with pytest.raises(JobError, match=naming("6 heads of 100", "768")):
        write_config(GraniteHybrid(), attrs.evolve(model(), attention=heads), CATALOG)
    experts = model(**EXPERTS)
    alone = attrs.evolve(experts, ffn=attrs.evolve(experts.ffn, shared_experts=0))
    with pytest.raises(JobError, match=naming("shared_experts")):
        write_config(GraniteHybrid(), alone, CATALOG)
    before = attrs.evolve(model(), attention=Mamba2(heads=48, head_dim=32, norm="before"))
    with pytest.raises(JobError, match=naming("attention.norm")):
        write_config(GraniteHybrid(), before, CATALOG)


def test_bounds_of_steps_are_kept() -> None:
    limited = model(time_step_limit=[0.001, 0.1], layer_types=["mamba"] * 32)
    assert limited.attention.dt_limit == (0.001, 0.1)
    assert write_config(GraniteHybrid(), limited, CATALOG)["time_step_limit"] == [0.001, 0.1]
    below = attrs.evolve(limited, attention=attrs.evolve(limited.attention, dt_limit=(0.5, 0.0)))
    written = write_config(GraniteHybrid(), below, CATALOG)
    assert written["time_step_limit"] == [0.5, {"__float__": "Infinity"}]
    assert model(**{"layer_types": ["mamba"] * 32, **written}).attention.dt_limit == (0.5, 0.0)


def test_a_layer_that_is_not_there_is_refused() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 8}
    config = {"model_type": "bamba", **sizes, "intermediate_size": 8, "mamba_n_heads": 4}
    with pytest.raises(JobError, match=naming("attn_layer_indices", "4 layers")):
        read_config(Bamba(), {**config, "attn_layer_indices": [1, 4]})
    table = read_config(Bamba(), {**config, "attn_layer_indices": [1, 3]})
    assert len(table["attention"]["kinds"]) == 2
