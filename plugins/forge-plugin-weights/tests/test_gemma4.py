"""Gemma 4: the language model of one with images, and what its configurations may have that Forge does not compute."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from published_models import GEMMA4, MODELS, ids_of, logits, ours, rewrite
from published_vision import BUDGETED

from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import Catalog
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import import_folder
from forge_plugin_weights.tables import load_architecture, read_config

NAME = "gemma4_text"


def test_matrices_of_keys_that_nothing_is_computed_with_are_left_out(tmp_path):
    """Published files have them in all layers; the class of `transformers` neither reads nor writes them."""
    theirs = MODELS["gemma4_text, small"].write(tmp_path / "published")

    def with_unused(tensors):
        unused = {
            f"model.layers.{layer}.self_attn.{name}.weight": torch.zeros(3)
            for layer in (3, 4, 5)
            for name in ("k_proj", "v_proj", "k_norm")
        }
        assert not unused.keys() & tensors.keys()
        return tensors | unused

    rewrite(tmp_path / "published", with_unused)
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)
    with torch.no_grad():
        assert (logits(ours(run), ids_of()) - theirs(ids_of()).logits).abs().max() < 1e-4


def test_the_language_model_comes_in_and_goes_out_without_its_vision_tower(tmp_path):
    theirs = BUDGETED["gemma4"].write(tmp_path / "published")
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False, architecture=NAME)
    ids = ids_of() % 56
    with torch.no_grad():
        expected = theirs(ids).logits
    assert expected.std() > 0.1
    assert (logits(ours(run), ids) - expected).abs().max() < 1e-4
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(
        export_run(run, tmp_path / "out"), output_loading_info=True
    )
    assert not any(loading.values())
    assert type(again) is transformers.Gemma4ForCausalLM
    with torch.no_grad():
        assert (again(ids).logits - expected).abs().max() < 1e-5


MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
OTHER_WIDTH = {str(layer): {"head_dim": 16} for layer in (2, 3)}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"per_layer_config": {**OTHER_WIDTH, "0": {"head_dim": 32}}}, "per_layer_config has layers that differ"),
        ({"per_layer_config": {**OTHER_WIDTH, "3": {"head_dim": 32}}}, "per_layer_config has layers that differ"),
        ({"per_layer_config": {"3": {"intermediate_size": 16}}}, "per_layer_config has intermediate_size"),
        ({"per_layer_config": OTHER_WIDTH, "global_head_dim": 32}, "per_layer_config has .* and keys beside it"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters has no sliding_attention"),
        ({"rope_parameters": {**GEMMA4["rope_parameters"], "other": {}}}, "rope_parameters has other"),
        ({"sliding_window_pattern": 6}, "sliding_window_pattern"),
        ({"hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        ({**MOE, "num_experts": None}, "num_experts is missing"),
        ({**MOE, "moe_intermediate_size": 20}, "intermediate_size = 48 is no multiple of moe_intermediate_size = 20"),
        ({**MOE, "hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ({**MOE, "num_kv_shared_layers": 1, "use_double_wide_mlp": True}, "use_double_wide_mlp = True"),
    ],
)
def test_what_forge_does_not_compute_is_refused_by_key(keys: dict[str, Any], words: str):
    published = MODELS[NAME].model().config.to_dict() | {"attention_k_eq_v": False}
    config = {key: value for key, value in published.items() if key != "per_layer_config"}
    architecture = load_architecture(NAME, Catalog.installed())
    read_config(architecture, json.loads(json.dumps(config)))
    with pytest.raises(JobError, match=words):
        read_config(architecture, {**config, **keys})
