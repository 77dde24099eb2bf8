"""Forms that files of one model have: names, buffers and keys of other versions, and which files an import links."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from published_models import MODELS, ids_of, logits, ours
from safetensors.torch import load_file, save_file

from forge_core.checkpoint.resume import locate
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import COMPUTED, import_folder


def imported(folder: Path) -> Path:
    return import_folder(folder, folder.with_name("run"), tokenizer=False)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def rewritten(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Put other tensors into one file of the folder."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})


def change(folder: Path, **keys: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def test_files_of_gpt2_may_lack_the_prefix_and_hold_masks(tmp_path):
    """As `openai-community/gpt2` does, whose configuration is from before most keys were there."""
    folder = tmp_path / "published"
    theirs = MODELS["gpt2"].write(folder)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors_of(folder).items()}
    mask = torch.ones(1, 1, 32, 32).tril()
    rewritten(folder, {**tensors, **{f"h.{layer}.attn.bias": mask.clone() for layer in range(3)}})
    change(
        folder, n_ctx=32, task_specific_params={"text-generation": {}}, resid_pdrop=0.1, n_inner=..., summary_type=...
    )
    run = imported(folder)
    with torch.no_grad():
        assert (logits(ours(run), ids_of()) - theirs(ids_of()).logits).abs().max() < 1e-4
    out = export_run(run, tmp_path / "out")
    assert tensors_of(out).keys() == {f"transformer.{name}" for name in tensors}
    config = json.loads((out / "config.json").read_text())
    assert (config["n_positions"], config["max_position_embeddings"], config["resid_pdrop"]) == (32, 32, 0.0)


def test_files_of_pythia_may_hold_masks(tmp_path):
    folder = tmp_path / "published"
    theirs = MODELS["gpt_neox"].write(folder)
    masks = {"bias": torch.ones(1, 1, 8, 8), "masked_bias": torch.tensor(-1e9), "rotary_emb.inv_freq": torch.ones(2)}
    extra = {f"gpt_neox.layers.0.attention.{name}": tensor for name, tensor in masks.items()}
    rewritten(folder, {**tensors_of(folder), **extra})
    change(folder, rope_parameters=..., rotary_pct=0.5, rotary_emb_base=500, classifier_dropout=0.1)
    run = imported(folder)
    with torch.no_grad():
        assert (logits(ours(run), ids_of()) - theirs(ids_of()).logits).abs().max() < 1e-4


def test_fused_rows_by_head_are_used_where_they_lie(tmp_path):
    """Queries of GPT-NeoX are as many ranges of rows as there are heads; nothing is computed."""
    MODELS["gpt_neox"].write(tmp_path / "published")
    checkpoint, manifest = locate(imported(tmp_path / "published"), "full")
    assert COMPUTED not in manifest["files"]
    index = json.loads((checkpoint / "index.json").read_text())
    assert [chunk["offsets"] for chunk in index["model.layers.0.attention.k.weight"]["chunks"]] == [
        [row, 0] for row in (0, 8, 16, 24)
    ]


def test_files_of_nothing_but_computed_tensors_are_not_linked(tmp_path):
    folder = tmp_path / "published"
    MODELS["gpt2"].write(folder)
    tensors = tensors_of(folder)
    by_columns = {name: tensor for name, tensor in tensors.items() if name.endswith("c_fc.weight")}
    rewritten(folder, {name: tensor for name, tensor in tensors.items() if name not in by_columns})
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file(by_columns, folder / "b.safetensors")
    run = imported(folder)
    checkpoint, manifest = locate(run, "full")
    assert {path.name for path in checkpoint.glob("*.safetensors")} == {"a.safetensors"}
    assert COMPUTED in manifest["files"]
    assert json.loads((run / "origin.json").read_text())["files"].keys() == {"a.safetensors", "b.safetensors"}


@pytest.mark.parametrize("name", ["longrope", "su"])
def test_positions_of_phi3_are_read_as_it_first_wrote_them(tmp_path, name):
    folder = tmp_path / "published"
    theirs = MODELS["phi3, longrope"].write(folder)
    form = json.loads((folder / "config.json").read_text())["rope_parameters"]
    scaling = {"type": name, "short_factor": form["short_factor"], "long_factor": form["long_factor"]}
    change(folder, rope_parameters=..., rope_scaling=scaling, rope_theta=10000.0, partial_rotary_factor=0.75)
    run = imported(folder)
    for length in (8, 24):
        ids = ids_of(length=length)
        with torch.no_grad():
            assert (logits(ours(run), ids) - theirs(ids).logits).abs().max() < 1e-4
    config = json.loads((export_run(run, tmp_path / "out") / "config.json").read_text())
    assert config["rope_scaling"] == {**scaling, "type": "longrope"}, "transformers 4 takes three keys"
    assert (config["max_position_embeddings"], config["original_max_position_embeddings"]) == (128, 16)
