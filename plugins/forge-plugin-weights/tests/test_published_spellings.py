"""Rare keys of newer families mean what they mean to `transformers`: nulls, empty tables, lengths, unused parts."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from published_models import DYNAMIC, GROWING, LLAMA3, LONGROPE, MODELS, ids_of, logits, ours, wide_logits

from forge_core.contracts.errors import JobError
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import import_folder
from forge_testing.refusals import at, naming, refuses_all

GROWTH = {key: GROWING[key] for key in ("original_max_position_embeddings", "llama_4_scaling_beta")}
FACTORS = [1.0, 1.1, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8]
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": FACTORS,
    "long_factor": FACTORS[::-1],
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
SHARE = {"rope_type": "default", "rope_theta": 500.0}


def changed(folder: Path, keys: Mapping[str, Any]) -> None:
    """Change keys of a folder's configuration; `...` leaves one out."""
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def published(folder: Path, name: str, keys: Mapping[str, Any]) -> None:
    """Write a model with other keys than its family has here, the configuration as given."""
    model = MODELS[name]
    own = copy.deepcopy({**model.keys, **keys})  # transformers fills in tables that it is given
    type(model)(model.name, own, model.config, model.head).write(folder)
    changed(folder, keys)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("ministral3", {"rope_parameters": {**GROWTH, **LLAMA3, "original_max_position_embeddings": 8}}),
        ("ministral3", {"rope_parameters": {**GROWTH, **LONG}}),
        ("ministral3", {"rope_parameters": {**GROWTH, **DYNAMIC}, "max_position_embeddings": 16}),
        ("ministral3", {"rope_parameters": {**GROWTH, **LINEAR}}),
        ("bamba", {"rope_parameters": {**SHARE, "partial_rotary_factor": 0.25}}),
        ("bamba", {"rope_parameters": {**SHARE, "partial_rotary_factor": 1.0}, "partial_rotary_factor": 0.25}),
        ("bamba", {"mamba_conv_bias": None}),
        ("granitemoehybrid", {"mamba_conv_bias": None}),
        ("granitemoehybrid", {"attention_multiplier": None}),
        ("kimi_linear", {"moe_renormalize": None}),
        ("apertus", {"rope_parameters": {}}),
        ("cohere2", {"layer_types": ["full_attention"] * 5}),
    ],
)
def test_a_rare_spelling_is_read_and_an_export_means_the_same(tmp_path, name, keys):
    published(tmp_path / "published", name, keys)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "published")
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)
    expected = wide_logits(theirs, ids_of())
    assert (logits(ours(run, "fp64"), ids_of()) - expected).abs().max() < 1e-9
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(
        export_run(run, tmp_path / "out"), output_loading_info=True
    )
    assert not any(loading.values())
    assert (wide_logits(again, ids_of()) - expected).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("granitemoehybrid", {"layer_types": ["attention"] * 3}),
        ("bamba", {"attn_layer_indices": [0, 1, 2]}),
    ],
)
def test_without_mamba_an_export_has_heads_that_fit_the_width(tmp_path, name, keys):
    published(tmp_path / "published", name, {**keys, "hidden_size": 24, "mamba_n_heads": 4, "mamba_d_head": 12})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "published").eval()
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)
    again = transformers.AutoModelForCausalLM.from_pretrained(export_run(run, tmp_path / "out"))
    with torch.no_grad():
        assert torch.equal(again.eval()(ids_of()).logits, theirs(ids_of()).logits)


@pytest.mark.parametrize("name", ["kimi_linear", "deepseek_v3"])
def test_values_wider_than_keys_are_refused_by_key(tmp_path, name):
    MODELS[name].write(tmp_path / "published")
    changed(tmp_path / "published", {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 17})
    with pytest.raises(JobError, match=naming("v_head_dim = 17", "qk_nope_head_dim", 16)):
        import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)


def test_another_number_of_factors_than_of_pairs_is_refused_by_key(tmp_path):
    MODELS["phi3, longrope"].write(tmp_path / "published")
    changed(tmp_path / "published", {"rope_parameters": {**LONGROPE, "long_factor": [1.5, 2.0]}})
    with refuses_all(at("model.attention.rope.long_factor", 2, 3)):
        import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)
