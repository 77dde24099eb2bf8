"""What Forge, or a configuration, cannot express of Nemotron-H is refused by name."""

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
from forge_plugin_transformer import FFNPattern, NoFFN, SquaredReLU, SwiGLU
from forge_plugin_weights.architectures.nemotron_h import NemotronH
from forge_plugin_weights.tables import read_config, write_config
from forge_testing.refusals import naming

CATALOG = Catalog.installed()
CONFIGS = json.loads(Path(__file__).with_name("published_configs.json").read_text())
NANO = CONFIGS["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"]
LISTED = ["mamba", "mlp", "attention", "linear_attention"]


def model(**keys: Any) -> Any:
    return parse_component(read_config(NemotronH(), {**NANO, **keys}), "config.json", ModelComponent, CATALOG)


def short(letters: str, **keys: Any) -> Any:
    return model(hybrid_override_pattern=letters, num_hidden_layers=len(letters), **keys)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"moe_latent_size": 1024}, ("moe_latent_size", "1024")),
        ({"moe_shared_expert_intermediate_size": 3000}, ("3000", "moe_intermediate_size = 1856")),
        ({"hybrid_override_pattern": "M" * 51 + "S"}, ("'S'", "moe")),
        ({"num_hidden_layers": 51}, ("num_hidden_layers = 51", "52")),
        ({"layers_block_type": ["mamba"] * 52}, ("layers_block_type", "hybrid_override_pattern")),
        ({"time_step_limit": [0.0, 0.1]}, ("time_step_limit", "time_step_min")),
        ({"tie_word_embeddings": True}, ("tie_word_embeddings", "head")),
        ({"mlp_hidden_act": "silu"}, ("mlp_hidden_act", "relu2")),
        ({"mamba_hidden_act": "gelu"}, ("mamba_hidden_act", "silu")),
        ({"attention_bias": True}, ("attention_bias",)),
        ({"mlp_bias": True}, ("mlp_bias",)),
        ({"sliding_window": 512}, ("sliding_window",)),
        ({"n_shared_experts": 2}, ("n_shared_experts", "moe_shared_expert_intermediate_size")),
        ({"norm_eps": 1e-6}, ("norm_eps", "layer_norm_epsilon")),
        ({"attention_head_dim": 64}, ("attention_head_dim", "head_dim = 128")),
    ],
)
def test_a_configuration_with_other_parts_is_refused(keys: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(JobError, match=naming(*named)):
        model(**keys)


def test_both_spellings_of_layers_are_read() -> None:
    listed = {key: value for key, value in NANO.items() if key not in ("hybrid_override_pattern", "num_hidden_layers")}
    table = read_config(NemotronH(), {**listed, "layers_block_type": LISTED})
    assert table == read_config(NemotronH(), {**listed, "hybrid_override_pattern": "M-*M"})
    assert table["layers"] == 4
    assert table["attention"]["layers"] == ["full", "none", "full_nope"]
    assert table["ffn"]["layers"] == ["none", "relu2", "none"]
    assert write_config(NemotronH(), short("M-*M"), CATALOG)["hybrid_override_pattern"] == "M-*M"


def test_a_model_that_a_configuration_cannot_express_is_refused() -> None:
    nano = short("M-E")
    both = FFNPattern(layers=("a", "b", "a"), kinds={"a": SquaredReLU(), "b": NoFFN()})
    with pytest.raises(JobError, match=naming("layer 0", "no single part")):
        write_config(NemotronH(), attrs.evolve(nano, ffn=both), CATALOG)
    gated = attrs.evolve(nano.ffn, kinds={**nano.ffn.kinds, "relu2": SwiGLU()})
    with pytest.raises(JobError, match=naming("layer 1", "swiglu")):
        write_config(NemotronH(), attrs.evolve(nano, ffn=gated), CATALOG)
    experts = attrs.evolve(nano.ffn.kinds["moe"], shared_experts=0)
    alone = attrs.evolve(nano.ffn, kinds={**nano.ffn.kinds, "moe": experts})
    with pytest.raises(JobError, match=naming("shared_experts")):
        write_config(NemotronH(), attrs.evolve(nano, ffn=alone), CATALOG)
    bounded = attrs.evolve(nano.attention.kinds["full"], dt_limit=(0.001, 0.1))
    limited = attrs.evolve(nano.attention, kinds={**nano.attention.kinds, "full": bounded})
    with pytest.raises(JobError, match=naming("dt_limit", "0.1")):
        write_config(NemotronH(), attrs.evolve(nano, attention=limited), CATALOG)
