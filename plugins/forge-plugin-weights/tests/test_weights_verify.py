"""`weights verify`: equal models, rounded ones, and one wrong tensor; a layer of each in memory at a time."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from published_models import MODELS, logits, ours
from safetensors.torch import load_file, save_file

from forge_core.cli import main
from forge_core.plugins.catalog import Catalog
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import import_folder
from forge_plugin_weights.verifying import compare_logits, open_side
from forge_testing.refusals import lacks


@pytest.fixture
def folders(tmp_path):
    """A published model, and a run that was made of it."""
    MODELS["qwen2"].write(tmp_path / "published")
    return tmp_path / "published", import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)


def test_an_import_equals_its_source(folders, capsys):
    published, run = folders
    assert main(["weights", "verify", str(published), str(run)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^tensors: .* 0 with", out, re.MULTILINE)
    assert not lacks(out, "difference 0", "divergence 0", "100.0%", "256 positions")
    assert main(["weights", "verify", str(published), str(run), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"] == []
    assert {tensor["equal"] for tensor in facts["tensors"]} == {True}
    assert facts["computed"]["logits"] == 0


def test_the_optimizer_need_not_be_installed(folders, tmp_path, capsys):
    published, run = folders
    for path in (run / "job.toml", *run.glob("checkpoints/*/manifest.json")):
        text = path.read_text()
        assert "forge-plugin-adamw/adamw" in text
        path.write_text(text.replace("forge-plugin-adamw/adamw", "forge-plugin-nowhere/nobody"))
    assert main(["weights", "verify", str(published), str(run)]) == 0
    assert main(["weights", "export", str(run), "--out", str(tmp_path / "out")]) == 0
    assert "forge-plugin-nowhere/nobody" in (tmp_path / "out/forge/job.toml").read_text()
    assert main(["weights", "verify", str(published), str(tmp_path / "out")]) == 0


def test_an_import_needs_no_optimizer(tmp_path):
    MODELS["qwen2"].write(tmp_path / "published")
    catalog = Catalog.installed()
    offers = [offer for offer in catalog.offers() if offer.distribution.name != "forge-plugin-adamw"]
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False, catalog=Catalog(offers))
    assert 'type = "forge-plugin-adamw/adamw"' in (run / "job.toml").read_text()
    [manifest] = run.glob("checkpoints/*/manifest.json")
    recorded = json.loads(manifest.read_text())["provenance"]
    assert recorded["components"]["optimizer"] == "forge-plugin-adamw/adamw"
    assert "forge-plugin-adamw" not in recorded["distributions"]


def test_rounding_and_a_wrong_tensor_are_told_by_layer(folders, tmp_path, capsys):
    published, run = folders
    out = export_run(run, tmp_path / "narrow", dtype=torch.bfloat16)
    report = tmp_path / "report.json"
    assert main(["weights", "verify", str(run), str(out), "--report", str(report)]) == 1
    rounded = json.loads(report.read_text())["computed"]
    assert 0 < max(rounded["layers"].values()) < 0.05
    assert 0 < rounded["divergence"] < 0.01

    wrong = tmp_path / "wrong"
    shutil.copytree(published, wrong)
    name = "model.layers.1.mlp.up_proj.weight"
    path = next(path for path in wrong.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(path)
    tensors[name] = -tensors[name]
    save_file(tensors, path, {"format": "pt"})
    capsys.readouterr()
    assert main(["weights", "verify", str(published), str(wrong), "--report", str(report)]) == 1
    assert re.search(r" 1 with .*\n  layers\.1\.ffn\.up\.weight: 2 ", capsys.readouterr().out)
    by_layer = json.loads(report.read_text())["computed"]["layers"]
    assert by_layer["0"] == 0
    assert by_layer["1"] > 0.1


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "gemma3_text", "deepseek_v3"])
def test_layers_one_at_a_time_compute_what_the_whole_model_does(tmp_path, name):
    MODELS[name].write(tmp_path / "published")
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)
    from forge_plugin_weights.verifying import _LayerByLayer

    catalog = Catalog.installed()
    ids = torch.arange(20)[None]
    parts = _LayerByLayer(open_side(tmp_path / "published", catalog), {"input_ids": ids}, catalog)
    with torch.no_grad():
        assert [layer for layer, _ in parts.hidden_states()] == [str(n) for n in range(len(parts._model.layers))]
        assert (parts.logits() - logits(ours(run), ids)).abs().max() < 1e-5
    assert all(parameter.is_meta for parameter in parts._model.parameters())
    same = compare_logits(
        *(open_side(path, catalog) for path in (run, tmp_path / "published")), {"input_ids": ids}, catalog
    )
    assert same.logits == 0


def test_other_models_are_refused(folders, tmp_path, capsys):
    published, _ = folders
    MODELS["llama, tied"].write(tmp_path / "other")
    assert main(["weights", "verify", str(published), str(tmp_path / "other")]) == 2
    assert not lacks(capsys.readouterr().err, "layers.0.attention.k.bias", "(16,)")
