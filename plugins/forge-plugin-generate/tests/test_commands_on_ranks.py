"""`generate` and `chat` with several ranks: the text of one process, and what is refused by name."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from forge_core import JobError, Trainer
from forge_core.cli import main
from forge_plugin_generate.options import add_run, separated

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
    for stages in ([], ["--parallel.tp.degree=2"]):  # those of the job's own training, and others
        done = subprocess.run([*command, *stages], capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stdout) == (0, expected), done.stderr
    assert sorted(folder.rglob("*")) == before


STDIN = "reads standard input, which ranks do not have"
REFUSED = {
    ("chat", "--nproc", "2"): f"chat {STDIN}; use one process, or ask several ranks by: forge-run generate runs/run",
    ("generate", "--nproc", "2", "--interactive"): f"--interactive {STDIN}; ask several ranks by --prompt, or use one",
    ("generate", "--nproc", "2", "--chat"): f"--chat without --prompt {STDIN}",
    ("generate", "--parallel.tp.degree=2"): "tp 2 = 2 does not divide the 1 ranks\nthis is one process; --nproc N sta",
    ("generate", "--parallel.tp.degre=2"): "parallel.tp.degre: unknown key; did you mean 'degree'?",
    ("generate", "--optimizer.lr=2"): "--optimizer.lr=2: changes nothing here; what can be changed is model, parallel,",
    ("chat", "--train.device=cpu"): "the device is an option: --device",
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_is_refused(words, capsys):
    command, *options = words
    assert main([command, "runs/run", *options]) == 2
    assert REFUSED[words] in capsys.readouterr().err


def test_a_rank_of_another_launcher_is_refused_alike(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["chat", "runs/run"]) == 2
    assert f"chat {STDIN}" in capsys.readouterr().err
    assert main(["generate", "runs/run", "--nproc", "2"]) == 2
    assert "--nproc starts ranks, and this process is one of 2 ranks already" in capsys.readouterr().err


def test_keys_of_the_job_stand_between_options():
    def parsed(*words):
        parser = argparse.ArgumentParser()
        add_run(parser)
        parser.add_argument("--prompt")
        return separated(parser, words)

    options = parsed("--plugins.onednn", "run", "--prompt", "-- a. b", "--model.attention.kernel=sdpa")
    assert (options.path, options.prompt) == ("run", "-- a. b")
    assert options.overrides == ["--plugins.onednn={}", "--model.attention.kernel=sdpa"]
    with pytest.raises(JobError, match=r"--train\.steps=3: changes nothing here"):
        parsed("run", "--train.steps=3")


def test_a_key_changes_the_model_that_is_loaded(capsys):
    words = ["generate", "runs/run", "--prompt", "the cat", "--max-tokens", "12"]
    assert main(words) == 0
    plain = capsys.readouterr().out
    assert main([*words, "--model.logit_soft_cap=1e-6"]) == 0  # as good as equal logits
    assert capsys.readouterr().out != plain
