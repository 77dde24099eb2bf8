"""Qwen3.5: files with experts apart, blocks of multi-token prediction, and the language model without its tower."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from published_models import MODELS as TEXTS
from published_models import Published, ids_of, logits, ours
from published_qwen import MODELS, Seeing
from safetensors.torch import load_file, save_file
from test_published_models import bytes_of, tensors_of
from test_published_vision import check_tensors, loaded

from forge_core.cli import main
from forge_core.plugins.catalog import Catalog
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import import_folder
from forge_plugin_weights.tables import load_architecture, read_config
from forge_testing.refusals import at, refuses_all


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "qwen3_5_moe"])
def test_files_with_experts_apart_come_in_and_an_export_has_them_in_stacks(tmp_path, name):
    """As `transformers` writes them, and as releases in FP8 are."""
    stacked = {**TEXTS, **MODELS}[name]
    stacked.write(tmp_path / "stacked")
    apart = (
        Published(stacked.name, stacked.keys, stacked.config) if name in TEXTS else Seeing(stacked.name, stacked.config)
    )
    theirs = apart.write(tmp_path / "apart")
    assert any(".experts.1.up_proj.weight" in key for key in tensors_of(tmp_path / "apart"))
    out = export_run(import_folder(tmp_path / "apart", tmp_path / "run", tokenizer=False), tmp_path / "out")
    before, after = tensors_of(tmp_path / "stacked"), tensors_of(out)
    assert after.keys() == before.keys()
    assert all(bytes_of(after[key]) == bytes_of(before[key]) for key in before)
    check_tensors(theirs, loaded(out, theirs), ())


def with_predictions(folder: Path) -> None:
    """Add tensors of a block of multi-token prediction, as published files have them."""
    path = sorted(folder.glob("*.safetensors"))[0]
    save_file({**load_file(path), "mtp.fc.weight": torch.ones(2, 2)}, path, {"format": "pt"})


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_language_model_comes_in_alone(tmp_path, capsys, name):
    theirs = MODELS[name].write(tmp_path / "published")
    with_predictions(tmp_path / "published")
    arguments = ["weights", "import", str(tmp_path / "published"), "--no-tokenizer", "--out"]
    assert main([*arguments, str(tmp_path / "whole")]) == 0
    assert "mtp.fc.weight" in capsys.readouterr().out
    assert main([*arguments, str(tmp_path / "run"), "--architecture", f"{name}_text"]) == 0
    assert "visual." in capsys.readouterr().out  # of what was left out
    ids = ids_of() % 60
    with torch.no_grad():
        expected = theirs(ids).logits
    assert expected.std() > 0.1
    assert (logits(ours(tmp_path / "run"), ids) - expected).abs().max() < 1e-4
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(
        export_run(tmp_path / "run", tmp_path / "out"), output_loading_info=True
    )
    assert not any(loading.values())
    assert type(again).__name__ == TEXTS[f"{name}_text"].name + "ForCausalLM"
    with torch.no_grad():
        assert torch.equal(again(ids).logits, expected)


@pytest.mark.parametrize(
    ("table", "changes", "expected"),
    [
        ("text_config", {"attn_output_gate": False}, at("", "attn_output_gate = False")),
        ("text_config", {"output_gate_type": "sigmoid"}, at("", "output_gate_type = 'sigmoid'")),
        ("text_config", {"layer_types": ["sliding_attention"] * 3}, at("", "sliding_attention", "linear_attention")),
        ("vision_config", {"deepstack_visual_indexes": [1]}, at("", "deepstack_visual_indexes = [1]")),
    ],
)
def test_what_forge_does_not_compute_is_named(table, changes, expected):
    config = MODELS["qwen3_5"].config().to_dict()
    config[table] = {**config[table], **changes}
    with refuses_all(expected):
        read_config(load_architecture("qwen3_5", Catalog.installed()), config)
