"""Hunyuan's stretched bases, Ministral 3 without its tower, and what files of these and others may not have."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from published_models import GROWING, MODELS, SIZES, SPECIAL, ids_of, logits, ours, randomised

from forge_core.plugins.catalog import Catalog
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import import_folder
from forge_plugin_weights.tables import architecture_of, read_config
from forge_testing.refusals import at, refuses_all

ALPHA = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0, "mscale_all_dim": 0.0}
"""`rope_scaling` of Hunyuan's published files, which have further keys that nothing reads."""


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_a_base_that_alpha_stretches_is_a_larger_base(tmp_path, spelling):
    keys = {**SIZES, **SPECIAL, "head_dim": 16, "rope_scaling": ALPHA, "rope_theta": 500.0}
    theirs = randomised(transformers.HunYuanDenseV1ForCausalLM(transformers.HunYuanDenseV1Config(**keys)))
    assert theirs.model.rotary_emb.rope_type == "ntk_alpha"
    theirs.save_pretrained(tmp_path / "published")
    config = json.loads((tmp_path / "published/config.json").read_text())
    if spelling == "rope_scaling":
        del config["rope_parameters"]
        config |= {"rope_scaling": ALPHA, "rope_theta": 500.0}
    (tmp_path / "published/config.json").write_text(json.dumps(config))
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)
    again = transformers.AutoModelForCausalLM.from_pretrained(export_run(run, tmp_path / "out"))
    with torch.no_grad():
        expected = theirs(ids_of()).logits
        assert (logits(ours(run), ids_of()) - expected).abs().max() < 1e-4
        assert (again(ids_of()).logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        (
            "ministral3",
            {"rope_parameters": {key: value for key, value in GROWING.items() if key != "llama_4_scaling_beta"}},
            at("", "rope_parameters", "llama_4_scaling_beta"),
        ),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}},
            at("", "rope_parameters", "original_max_position_embeddings"),
        ),
        ("helium", {"head_dim": 16}, at("", "head_dim = 16", "hidden_size = 32", "4 heads")),
        ("hunyuan_v1_dense", {"use_qk_norm": False}, at("", "use_qk_norm = False")),
        ("hunyuan_v1_dense", {"use_cla": True}, at("", "use_cla = True")),
        ("apertus", {"rope_parameters": None, "rope_theta": 5e5}, at("", "rope_theta = 500000.0", "rope_parameters")),
        ("apertus", {"qk_norm": False}, at("", "qk_norm = False")),
        ("arcee", {"hidden_act": "silu"}, at("", "hidden_act = 'silu'", "relu2")),
    ],
)
def test_what_forge_does_not_compute_is_named(name, changes, expected):
    config = MODELS[name].model().config.to_dict()
    _, architecture = architecture_of(config, Catalog.installed())
    with refuses_all(expected):
        read_config(architecture, {**config, **changes})


def test_the_language_model_of_ministral_comes_in_without_its_tower(tmp_path):
    text = {**SIZES, **SPECIAL, "head_dim": 16, "model_type": "ministral3", "rope_parameters": GROWING}
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Mistral3Config(
        text_config=text,
        vision_config={**tower, "image_size": 16, "patch_size": 8, "model_type": "pixtral"},
        image_token_index=60,
        tie_word_embeddings=False,
    )
    theirs = randomised(transformers.Mistral3ForConditionalGeneration(config))
    theirs.save_pretrained(tmp_path / "published")
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False, architecture="ministral3")
    ids = ids_of() % 60
    with torch.no_grad():
        expected = theirs(ids).logits
        assert (logits(ours(run), ids) - expected).abs().max() < 1e-4
        again, loading = transformers.AutoModelForCausalLM.from_pretrained(
            export_run(run, tmp_path / "out"), output_loading_info=True
        )
        assert not any(loading.values())
        assert type(again) is transformers.Ministral3ForCausalLM
        assert torch.equal(again(ids).logits, expected)
