"""A trained model is used without what it was trained with, and what is no run is refused with what to do."""

from __future__ import annotations

import shutil

import pytest

from forge_core.cli import main
from forge_core.engine import build
from forge_testing.refusals import lacks

JOB = """
train = { steps = 1, global_batch_size = 2, seq_len = 16, device = "cpu" }
job = { name = "run", output = "runs" }
model = { type = "transformer", dim = 8, layers = 1, attention = { heads = 2 } }
optimizer = { type = "forge_testing:TinyAdamW" }
data.tokenizer = { type = "bytes" }
data.sources = [{ type = "text", path = "text.txt", held_out_every = 0 }]
"""
ASK = ["generate", "runs/run", "--prompt", "a", "--max-tokens", "4", "--temperature", "0", "--device", "cpu"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a b c d e f g h i j k l m n o p " * 20)
    (tmp_path / "job.toml").write_text(JOB)
    assert main(["job.toml"]) == 0
    return tmp_path


def test_neither_data_nor_optimizer_is_built(run, capsys, monkeypatch):
    capsys.readouterr()
    assert main(ASK) == 0
    expected = capsys.readouterr().out

    def refuse(*arguments, **options):
        raise AssertionError("was built")

    for name in ("build_datasets", "build_run", "assemble"):
        monkeypatch.setattr(build, name, refuse)
    monkeypatch.setattr("forge_testing.TinyAdamW.build", refuse)
    (run / "text.txt").unlink()
    assert main(ASK) == 0
    assert capsys.readouterr().out == expected


def test_the_optimizer_and_the_data_need_not_be_installed(run, capsys):
    capsys.readouterr()
    assert main(ASK) == 0
    expected = capsys.readouterr().out
    for path in (run / "runs/run/job.toml", *run.glob("runs/run/checkpoints/*/manifest.json")):
        text = path.read_text()
        for type_ in ("forge_testing.tiny:TinyAdamW", "forge-plugin-text/text"):
            assert type_ in text
            text = text.replace(type_, "forge-plugin-nowhere/nobody")
        path.write_text(text)
    assert main(ASK) == 0
    assert capsys.readouterr().out == expected
    assert main(["runs/run/job.toml"]) == 2
    assert not lacks(capsys.readouterr().err, "optimizer.type", "forge-plugin-nowhere")


def test_a_folder_that_is_no_run_is_refused_with_what_to_do(run, capsys):
    (run / "published").mkdir()
    (run / "published/config.json").write_text("{}")
    shutil.rmtree(run / "runs/run/checkpoints")
    for folder, message in {
        "published": "make a run of it by `forge-run weights import published --out runs/published`",
        "nowhere": "nowhere: no such run folder",
        "runs/run": "runs/run is neither a checkpoint nor a run folder with checkpoints",
    }.items():
        assert main(["generate", folder, "--prompt", "a"]) == 2
        assert message in capsys.readouterr().err
