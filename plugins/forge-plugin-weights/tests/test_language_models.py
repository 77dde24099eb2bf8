"""Language models of published vision-language models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from published_models import LATENT, SIZES, VOCABULARY, YARN, ids_of, logits, ours, randomised, rewrite

from forge_core.cli import main
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import import_folder
from forge_testing.refusals import refuses

NAME = "gemma3_text"


def write_gemma3(folder: Path, inner: dict[str, Any] | None = None, **outer: Any) -> Any:
    """Write a tiny Gemma 3 with images; `inner` and `outer` have further keys of its text and of the whole."""
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 6,
        "sliding_window_pattern": 3,
    }
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={**text, **(inner or {})},
        vision_config={**vision, "image_size": 16, "patch_size": 8},
        mm_tokens_per_image=1,
        image_token_index=60,
        boi_token_index=61,
        eoi_token_index=62,
        **outer,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return model


@pytest.fixture
def gemma3(tmp_path: Path) -> Any:
    """A tiny Gemma 3 with images, written to `published`."""
    return write_gemma3(tmp_path / "published")


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_the_head_is_the_embedding_where_version_5_says_so(tmp_path, outer, inner):
    """In the outer table: it leaves a default in the inner one, which may contradict it."""
    tied = "tie_word_embeddings"
    model = write_gemma3(tmp_path / "published", {tied: inner}, **{tied: outer})
    config = json.loads((tmp_path / "published/config.json").read_text())
    assert (config[tied], config["text_config"][tied]) == (outer, inner)
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False, architecture=NAME)
    ids = ids_of() % 60
    with torch.no_grad():
        expected = model(ids).logits
    assert (logits(ours(run), ids) - expected).abs().max() < 1e-4
    again = transformers.AutoModelForCausalLM.from_pretrained(export_run(run, tmp_path / "out"))
    assert again.config.tie_word_embeddings is outer
    with torch.no_grad():
        assert torch.equal(again(ids).logits, expected)


def test_version_4_says_it_in_the_inner_table(tmp_path):
    model = write_gemma3(tmp_path / "published")
    path = tmp_path / "published/config.json"
    config = json.loads(path.read_text()) | {"tie_word_embeddings": False, "transformers_version": "4.57.1"}
    path.write_text(json.dumps(config))
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False, architecture=NAME)
    ids = ids_of() % 60
    with torch.no_grad():
        assert (logits(ours(run), ids) - model(ids).logits).abs().max() < 1e-4


def test_the_language_model_comes_in_and_goes_out_without_its_vision_tower(tmp_path, gemma3):
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False, architecture=NAME)
    ids = ids_of() % 60
    with torch.no_grad():
        expected = gemma3(ids).logits
    assert expected.std() > 0.1
    assert (logits(ours(run), ids) - expected).abs().max() < 1e-4

    out = export_run(run, tmp_path / "out")
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading.values())
    assert type(again) is transformers.Gemma3ForCausalLM
    with torch.no_grad():
        assert torch.equal(again(ids).logits, expected)


def test_images_are_left_out_where_one_says_so_only(tmp_path, gemma3, capsys):
    arguments = ["weights", "import", str(tmp_path / "published"), "--out", str(tmp_path / "run"), "--no-tokenizer"]
    assert main(arguments) == 2
    assert NAME in capsys.readouterr().err
    assert main([*arguments, "--architecture", NAME]) == 0


def test_an_unknown_key_of_the_language_model_is_named(tmp_path, gemma3):
    path = tmp_path / "published/config.json"
    config = json.loads(path.read_text())
    config["text_config"]["attention_chunk_size"] = 8
    path.write_text(json.dumps(config))
    with refuses("attention_chunk_size", 8):
        import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False, architecture=NAME)


def test_sizes_that_published_files_leave_out_are_those_of_version_5():
    from forge_core.plugins.catalog import Catalog
    from forge_plugin_weights.tables import load_architecture, read_config

    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    architecture = load_architecture(NAME, Catalog.installed())
    by_5 = transformers.Gemma3Config(text_config=text).to_dict()
    assert read_config(architecture, {"text_config": text}) == read_config(architecture, by_5)


def test_kimi_k2_5_comes_in_without_its_tower(tmp_path, capsys):
    """By the names of published files: version 5 writes layers of text as `blocks`, the tower's old name."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    config = transformers.Kimi_K25Config(
        text_config={**SIZES, **LATENT, "model_type": "deepseek_v3", "rope_parameters": YARN, "pad_token_id": 0},
        vision_config={**sizes, "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
        projection_hidden_size=32,
        tie_word_embeddings=False,
        **{f"{name}_token_id": 60 for name in ("image", "video", "vision_start", "vision_end")},
    )
    torch.manual_seed(0)
    model = randomised(transformers.Kimi_K25ForConditionalGeneration(config))
    model.save_pretrained(tmp_path / "published", max_shard_size="40KB")
    rewrite(
        tmp_path / "published",
        lambda tensors: {name.replace("l.blocks", "l.layers"): tensors[name] for name in tensors},
    )
    path = tmp_path / "published/config.json"
    table = json.loads(path.read_text())
    table["text_config"]["model_type"] = "kimi_k2"  # as it is published
    path.write_text(json.dumps(table))
    arguments = ["weights", "import", str(tmp_path / "published"), "--out", str(tmp_path / "run"), "--no-tokenizer"]
    assert main([*arguments, "--architecture", "kimi_k2"]) == 0
    assert "mm_projector" in capsys.readouterr().out
    ids = ids_of() % 60
    with torch.no_grad():
        expected = model(ids).logits
    assert (logits(ours(tmp_path / "run"), ids) - expected).abs().max() < 1e-4
    again = transformers.AutoModelForCausalLM.from_pretrained(export_run(tmp_path / "run", tmp_path / "out"))
    with torch.no_grad():
        assert (again(ids).logits - expected).abs().max() < 1e-4
    table["text_config"]["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    path.write_text(json.dumps(table))
    for chosen in (["--architecture", "kimi_k2"], []):
        assert main([*arguments, "--out", str(tmp_path / "other"), *chosen]) == 2
        assert "compressed-tensors" in capsys.readouterr().err
