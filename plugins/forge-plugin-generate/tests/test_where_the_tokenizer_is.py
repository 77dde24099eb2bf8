"""The tokenizer of a checkpoint that lies outside its run folder."""

from __future__ import annotations

import shutil

import pytest

from forge_core.cli import main
from forge_core.contracts.errors import ForgeError
from forge_plugin_generate.command import load_model_and_tokenizer
from forge_plugin_text import Bytes, Text
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing.refusals import naming


@pytest.fixture
def run(make_job, train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog sat on the log\n" * 50)
    model = Transformer(dim=16, layers=1, attention=GroupedQueryAttention(heads=2))
    data = {"sources": (Text(path="text.txt", held_out_every=0),), "tokenizer": Bytes()}
    return train(make_job(model=model, data=data, steps=2)).folder


def test_a_checkpoint_elsewhere_is_read_with_the_tokenizer_of_its_run(run, tmp_path, capsys):
    shutil.copytree(run / "checkpoints/step-2", tmp_path / "disk/mirror/step-2")
    assert main(["generate", str(tmp_path / "disk/mirror/step-2"), "--prompt", "the", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("the")


def test_a_run_that_has_moved_is_named_by_a_flag(run, tmp_path):
    shutil.copytree(run / "checkpoints/step-2", tmp_path / "disk/mirror/step-2")
    run.rename(tmp_path / "moved")
    with pytest.raises(ForgeError, match=naming("step-2", "tokenizer", "--run")):
        load_model_and_tokenizer(tmp_path / "disk/mirror/step-2", "cpu")
    _, tokenizer = load_model_and_tokenizer(tmp_path / "disk/mirror/step-2", "cpu", tmp_path / "moved")
    assert tokenizer.vocab_size == 257
