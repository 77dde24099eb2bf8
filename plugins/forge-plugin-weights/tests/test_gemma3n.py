"""What configurations of Gemma 3n may have that Forge does not compute, and the figures of its defaults."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from published_models import MODELS

from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import Catalog
from forge_plugin_weights.tables import load_architecture, read_config

NAME = "gemma3n_text"


def architecture() -> Any:
    return load_architecture(NAME, Catalog.installed())


def test_a_configuration_without_keys_is_that_of_the_class():
    """The first ten of 35 layers are sparse, and the last 15 attend to keys of others."""
    table = read_config(architecture(), dict(architecture().defaults))
    assert table == read_config(architecture(), transformers.Gemma3nTextConfig().to_dict())
    sparse = [table["ffn"]["kinds"][kind]["sparsity"] for kind in table["ffn"]["layers"]]
    assert (sparse, table["kv_shared_layers"]) == ([0.95] * 10 + [0.0] * 25, 15)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"altup_correct_scale": False}, "altup_correct_scale = False"),
        ({"activation_sparsity_pattern": 0.5}, "activation_sparsity_pattern = 0.5"),
        ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern has 1 entries"),
        ({"intermediate_size": [48, 48]}, "intermediate_size has 2 entries"),
        ({"hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_what_forge_does_not_compute_is_refused_by_key(keys: dict[str, Any], words: str):
    config = MODELS[NAME].model().config.to_dict()
    read_config(architecture(), config)
    with pytest.raises(JobError, match=words):
        read_config(architecture(), {**config, **keys})
