"""What an export says of itself: that its files, read back, hold the weights, and a model card."""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path

import pytest
from published_models import MODELS

from forge_core.cli import main
from forge_plugin_weights.importing import import_folder
from forge_testing.refusals import lacks


@pytest.fixture(params=["qwen2", "gpt2", "qwen3_moe", "phi3"])
def run(request, tmp_path) -> Path:
    """A run whose parts are used as they are, transposed, stacked, or rows of a fused one."""
    MODELS[request.param].write(tmp_path / "published")
    return import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)


def parity(folder: Path) -> dict:
    return json.loads((folder / "forge/parity.json").read_text())


def test_an_export_is_read_back(run, tmp_path):
    assert main(["weights", "export", str(run), "--out", str(tmp_path / "out")]) == 0
    record = parity(tmp_path / "out")
    assert record["tensors"]["equal"] > 10
    assert record["tensors"]["rounded"] == {}
    assert record["model"] == []
    assert record["computed"] is None
    assert record["versions"]["torch"] == metadata.version("torch")


def test_rounding_and_what_is_computed_are_told(run, tmp_path):
    out = tmp_path / "out"
    assert main(["weights", "export", str(run), "--out", str(out), "--dtype=bfloat16", "--verify"]) == 0
    record = parity(out)
    assert all(0 < error < 0.01 for error in record["tensors"]["rounded"].values())
    assert len(record["tensors"]["rounded"]) > 10
    assert 0 < record["computed"]["divergence"] < 0.01
    assert 0 < max(record["computed"]["layers"].values()) < 0.1


def test_a_file_that_does_not_hold_what_was_written_is_no_export(tmp_path, capsys, monkeypatch):
    """As a disk that loses a write, or a mistake in where something is written."""
    MODELS["qwen2"].write(tmp_path / "published")
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)
    written = os.pwrite

    def lose_a_bit(file: int, data: memoryview, place: int) -> int:
        content = bytearray(data)
        content[len(content) // 2] ^= 1
        return written(file, content if place > 10_000 else data, place)

    monkeypatch.setattr(os, "pwrite", lose_a_bit)
    assert main(["weights", "export", str(run), "--out", str(tmp_path / "out")]) == 1
    assert not lacks(capsys.readouterr().err, "read back")
    assert {path.name for path in tmp_path.iterdir()} == {"published", "run"}


def test_a_card_says_what_the_export_was_made_of(run, tmp_path):
    assert main(["weights", "export", str(run), "--out", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out/README.md").read_text()
    origin = json.loads((run / "origin.json").read_text())
    assert f"| base model | published (`{origin['model_type']}`) |" in card
    assert all(f"`{digest}`" in card for digest in origin["files"].values())
    assert str(tmp_path) not in card, "no path of a machine"


def test_a_card_that_the_tokenizer_brought_is_kept(tmp_path):
    MODELS["qwen2"].write(tmp_path / "published")
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)
    (run / "tokenizer").mkdir()
    (run / "tokenizer/README.md").write_text("mine")
    assert main(["weights", "export", str(run), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/README.md").read_text() == "mine"
