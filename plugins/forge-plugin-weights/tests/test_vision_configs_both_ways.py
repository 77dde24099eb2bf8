"""Laws of configurations, as in test_configs_both_ways.py, for towers and for models that see images."""

from __future__ import annotations

from typing import Any

import pytest
from drawn_configs import INSTALLED, MANY
from drawn_vision_configs import DRAWN, keys_that_are_read, vision_configs
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from test_configs_both_ways import BY_MEANING, CATALOG, OWN_SPELLINGS, PHASES, by_transformers

from forge_core.contracts.components import ModelComponent
from forge_core.contracts.errors import JobError
from forge_kit.tools.commands import parse_component
from forge_plugin_weights.tables import read_config, write_config

INNER = ("text_config", "vision_config")
SPELT_OTHERWISE = {
    *BY_MEANING,
    *OWN_SPELLINGS["llama4_text"],
    *OWN_SPELLINGS["gemma4_text"],
    *("vision_feature_layer", "attention_heads", "num_attention_heads", "tie_word_embeddings", "vision_use_head"),
    *("model_type", "attention_dropout", "hidden_dropout_prob", "projection_dropout", "projector_dropout"),
}
"""Keys for which there are several ways to say one thing, or that say nothing of what is computed."""
FIRST = settings(max_examples=30, phases=[Phase.generate], derandomize=True, database=None)


def model_of(type_: str, config: dict[str, Any]) -> ModelComponent:
    """The model of a configuration, with every key: a language model may be written as another, plainer type."""
    return parse_component(read_config(INSTALLED[type_], config), "config.json", ModelComponent, CATALOG)


def written(type_: str, model: ModelComponent) -> dict[str, Any]:
    return {"model_type": type_, **write_config(INSTALLED[type_], model, CATALOG)}


@pytest.mark.parametrize("type_", DRAWN)
@settings(max_examples=5 * MANY, phases=PHASES)
@given(data=st.data())
def test_what_is_read_is_written_and_both_are_what_transformers_makes_of_it(type_, data):
    config = data.draw(vision_configs(type_))
    model = model_of(type_, config)
    assert model_of(type_, by_transformers(type_, config)) == model
    back = written(type_, model)
    assert model_of(type_, back) == model
    assert model_of(type_, by_transformers(type_, back)) == model
    check_keys(config, back)


def check_keys(config: dict[str, Any], back: dict[str, Any]) -> None:
    """Keys that a configuration and the one written of it have in common have the same values."""
    for table in (None, *INNER):
        given_, made = (each if table is None else each.get(table, {}) for each in (config, back))
        same = {*given_} & {*made} - {*INNER} - SPELT_OTHERWISE
        same -= {key for key in same if given_[key] is None}  # stands for what follows from other keys
        assert {key: made[key] for key in same} == {key: given_[key] for key in same}


@pytest.mark.parametrize("type_", DRAWN)
@settings(max_examples=1, phases=[Phase.generate], derandomize=True)
@given(data=st.data())
def test_an_unknown_key_is_refused_by_name_in_every_table(type_, data):
    config = data.draw(vision_configs(type_))
    for table in (table for table in INNER if table in config):
        with pytest.raises(JobError, match="novelty"):
            read_config(INSTALLED[type_], {**config, table: {**config[table], "novelty": 3}})
    with pytest.raises(JobError, match="novelty"):
        read_config(INSTALLED[type_], {**config, "novelty": 3})


@pytest.mark.parametrize("type_", DRAWN)
def test_every_key_that_is_read_is_drawn(type_):
    drawn: set[str] = set()

    def all_are_drawn(config: dict[str, Any]) -> bool:
        drawn.update(config)
        return keys_that_are_read(type_) <= drawn

    # Stops at the example with which the last key is drawn; raises if there is none.
    find(vision_configs(type_), all_are_drawn, settings=FIRST)
