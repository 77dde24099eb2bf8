"""MiMo-V2-Flash: text past the end of a window, spellings of published files, and what Forge does not compute."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from published_models import MODELS, YARN, ids_of, logits, ours, rewrite

from forge_core.contracts.components import ModelComponent
from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import parse_component
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_weights.importing import import_folder
from forge_plugin_weights.tables import load_architecture, read_config, write_config

CATALOG = Catalog.installed()
NAME = "mimo_v2_flash"
MIMO = load_architecture(NAME, CATALOG)


def test_greedy_tokens_are_those_of_transformers_beyond_the_window(tmp_path):
    theirs = MODELS[NAME].write(tmp_path / "published")
    model = ours(import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False))
    prompt = ids_of()[:, :4]  # of a window of 5
    options = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "eos_token_id": -1}
    expected = theirs.generate(prompt, do_sample=False, max_new_tokens=16, **options)[:, 4:]
    for use_cache in (True, False):
        rows = generate(model, prompt.tolist(), 16, -1, Sampling(temperature=0), use_cache=use_cache)
        assert rows == expected.tolist()


def test_sinks_by_the_name_of_the_class_and_blocks_of_further_prediction(tmp_path):
    theirs = MODELS[NAME].write(tmp_path / "published")
    extra = {"model.mtp.layers.0.enorm.weight": torch.ones(32)}
    rewrite(tmp_path / "published", lambda own: {
        **{name.replace("attention_sink_bias", "sinks"): tensor for name, tensor in own.items()}, **extra
    })  # fmt: skip
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)
    with torch.no_grad():
        assert (logits(ours(run), ids_of()) - theirs(ids_of()).logits).abs().max() < 1e-4


def config_of(**keys: Any) -> dict[str, Any]:
    return {**json.loads(MODELS[NAME].model().config.to_json_string(use_diff=False)), **keys}


def test_the_published_size_of_a_window_does_not_count_the_position_itself():
    read = read_config(MIMO, config_of(sliding_window_size=4, sliding_window=4))
    assert read == read_config(MIMO, config_of())
    assert {kind["window"] for kind in read["attention"]["kinds"].values()} == {0, 5}


def test_null_is_a_factor_of_one():
    attention = read_config(MIMO, config_of(attention_value_scale=None))["attention"]
    assert {kind["value_scale"] for kind in attention["kinds"].values()} == {1.0}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"hybrid_layer_pattern": [0, 1, 0]}, "hybrid_layer_pattern"),
        ({"moe_layer_freq": [0, 0, 1]}, "moe_layer_freq"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types"),
        ({"swa_num_key_value_heads": 2}, "swa_num_key_value_heads = 2, where other keys have 4"),
        ({"swa_num_attention_heads": 8}, "swa_num_attention_heads"),
        ({"swa_head_dim": 16}, "swa_head_dim"),
        ({"swa_v_head_dim": 8}, "swa_v_head_dim"),
        ({"add_swa_attention_sink_bias": False}, "add_swa_attention_sink_bias"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias"),
        ({"rope_theta": 1e6}, "rope_theta = 1000000.0, where other keys have 500.0"),
        ({"swa_rope_theta": 1e6}, "swa_rope_theta"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), YARN)}, "rope_type = 'yarn'"),
        ({"rope_parameters": {"full_attention": YARN}}, "no sliding_attention"),
        ({"layernorm_epsilon": 1e-6}, "layernorm_epsilon"),
        ({"attention_chunk_size": 64}, "attention_chunk_size"),
        ({"hybrid_block_size": 4}, "hybrid_block_size"),
        ({"n_shared_experts": 1}, "n_shared_experts"),
        ({"v_head_dim": 32}, "v_head_dim = 32"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace"),
        ({"attention_projection_layout": "fused_qkv"}, "attention_projection_layout"),
    ],
)
def test_what_forge_does_not_compute_is_refused_by_key(keys: dict[str, Any], words: str):
    with pytest.raises(JobError, match=words):
        read_config(MIMO, config_of(**keys))


@pytest.mark.parametrize(
    ("kind", "keys", "words"),
    [
        ("window", {"sinks": False}, "sinks = False"),
        ("full", {"sinks": True}, "sinks = True"),
        ("window", {"kv_heads": 2}, "kv_heads is not twice as large"),
        ("window", {"kv_heads": 1}, "kv_heads = 1"),
        ("window", {"v_head_dim": 8}, "v_head_dim"),
        ("full", {"value_scale": 0.5}, "value_scale"),
        ("full", {"gate": True}, "gate"),
    ],
)
def test_a_model_that_it_cannot_describe_is_not_exported_as_one(kind: str, keys: dict[str, Any], words: str):
    table = json.loads(json.dumps(read_config(MIMO, config_of())))
    table["attention"]["kinds"][kind] |= keys
    model = parse_component(table, "job.toml", ModelComponent, CATALOG)
    with pytest.raises(JobError, match=words):
        write_config(MIMO, model, CATALOG)
