"""`generate` and `chat` with several ranks: the text of one process, and what is refused by name."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

from forge_core import Trainer
from forge_core.cli import main
from forge_plugin_generate.options import add_run, separated
from forge_testing.refusals import lacks, refuses

TEXT = "the cat sat on the mat and the dog sat on the log\n"
JOB = {
    "job": {"name": "run", "output": "runs"},
    "train": {"steps": 1, "global_batch_size": 1, "seq_len": 16, "device": "cpu"},
    "model": {"type": "transformer", "dim": 16, "layers": 2, "init_std": 0.5, "attention": {"heads": 2}},
    "data": {"tokenizer": {"type": "bpe", "vocab_size": 264}, "sources": [{"type": "text", "path": "text.txt"}]},
    "optimizer": {"type": "forge_testing:TinyAdamW"},
    "parallel": {"fsdp": {}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "text.txt").write_text(TEXT * 20)
        Trainer(JOB, echo=lambda text: None).run()
    return folder


@pytest.fixture(autouse=True)
def _there(folder, monkeypatch):
    monkeypatch.chdir(folder)


def test_ranks_write_the_text_of_one_process(folder, capsys):
    words = ["generate", "runs/run", "--prompt", "the cat", "--prompt", "and", "--max-tokens", "12"]
    assert main(words) == 0
    expected = capsys.readouterr().out
    command = [sys.executable, "-m", "forge_core", *words, "--nproc", "2"]
    before = sorted(folder.rglob("*"))
    # The stages of the job's own training, and others
    for options in ([], ["--parallel.tp.degree=2", "--json"]):
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert (as_text(json.loads(done.stdout)) if "--json" in options else done.stdout) == expected
    assert sorted(folder.rglob("*")) == before


def as_text(facts):
    """What the command prints without `--json`."""
    return "".join(f"{each['prompt']}{each['text']}\n{'-' * 40}\n" for each in facts["texts"])


REFUSED = {
    ("chat", "--nproc", "2"): ["chat", "standard input", "forge-run generate runs/run"],
    ("generate", "--nproc", "2", "--interactive"): ["--interactive", "standard input", "--prompt"],
    ("generate", "--nproc", "2", "--chat"): ["--chat", "standard input", "--prompt"],
    ("generate", "--parallel.tp.degree=2"): ["tp 2 = 2", "1 ranks", "--nproc"],
    ("generate", "--parallel.tp.degre=2"): ["parallel.tp.degre", "'degree'"],
    ("generate", "--optimizer.lr=2"): ["--optimizer.lr=2", "model, parallel"],
    ("chat", "--train.device=cpu"): ["--device"],
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_is_refused(words, capsys):
    command, *options = words
    assert main([command, "runs/run", *options]) == 2
    assert not lacks(capsys.readouterr().err, *REFUSED[words])


def test_a_rank_of_another_launcher_is_refused_alike(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["chat", "runs/run"]) == 2
    assert not lacks(capsys.readouterr().err, "chat", "standard input")
    assert main(["generate", "runs/run", "--nproc", "2"]) == 2
    assert not lacks(capsys.readouterr().err, "--nproc", "2 ranks")


def test_keys_of_the_job_stand_between_options():
    def parsed(*words):
        parser = argparse.ArgumentParser()
        add_run(parser)
        parser.add_argument("--prompt")
        return separated(parser, words)

    options = parsed("--plugins.cpu_products", "run", "--prompt", "-- a. b", "--model.attention.kernel=sdpa")
    assert (options.path, options.prompt) == ("run", "-- a. b")
    assert options.overrides == ["--plugins.cpu_products={}", "--model.attention.kernel=sdpa"]
    with refuses("", "--train.steps=3"):
        parsed("run", "--train.steps=3")


def test_a_key_changes_the_model_that_is_loaded(capsys):
    words = ["generate", "runs/run", "--prompt", "the cat", "--max-tokens", "12"]
    assert main(words) == 0
    plain = capsys.readouterr().out
    assert main([*words, "--model.logit_soft_cap=1e-6"]) == 0  # as good as equal logits
    assert capsys.readouterr().out != plain
