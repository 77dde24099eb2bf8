"""Commands of pages that need a trained model run as they are written, on a tiny one of the same name."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fences import ROOT

from forge_core.cli import main

JOB = """
[train]
steps = 2
global_batch_size = 4
seq_len = 16
[model]
type = "transformer"
vocab_size = 260
dim = 16
layers = 4
init_std = 0.5
attention = { type = "gqa", heads = 4, kv_heads = 2 }
[data.tokenizer]
type = "bytes"
[[data.sources]]
type = "text"
path = "texts"
held_out_every = 4
[optimizer]
type = "forge_testing:TinyAdamW"
"""
FEWER = "--nproc 2"
"""Ranks in place of four: one share of `fsdp`."""
COMMAND = re.compile(r"^(?:    )?forge-run (.*)$", re.MULTILINE)
PAGES = {
    # `inside patch` needs a model that has learned
    "look-inside": {"inside lens", "inside attention", "inside extract", "inside taps", "generate"},
    "sparse-autoencoders": {"inside extract", "inside sae"},
}
"""Pages, each with the commands that are run."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs that pages name, which are one run under several names."""
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("texts").mkdir()
        for number in range(8):
            Path(f"texts/{number}.txt").write_text(f"import os  # {number}\n\ndef f(x): return x\n" * 20)
        Path("job.toml").write_text(JOB)
        assert main(["job.toml", "--job.name=quickstart", "--loggers.console.style=off"]) == 0
    for name in ("large", "features"):
        shutil.copytree(folder / "runs/quickstart", folder / "runs" / name)
    shutil.copytree(folder / "runs/large/checkpoints/step-2", folder / "runs/large/checkpoints/step-4000")
    return folder / "runs"


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_run_as_written(
    page: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(runs.parent / "texts", tmp_path / "texts")
    shutil.copytree(runs, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / f"docs/how-to/{page}.md").read_text()
    lines = [shlex.split(line.replace("--nproc 4", FEWER)) for line in COMMAND.findall(text)]
    names = [" ".join(words[: 1 + (words[0] == "inside")]) for words in lines]
    commands = [words for name, words in zip(names, lines, strict=True) if name in PAGES[page]]
    assert PAGES[page] <= set(names)
    for command in commands:
        assert run(command) == 0, command


def run(command: list[str]) -> int:
    """Run a command of `forge-run` here, or in a process where it starts ranks: these are forks of it then.

    Those of this process would be started by `exec` (see `forked_starts.py`), and each import torch.
    """
    if not any(word.startswith("--nproc") for word in command):
        return main(command)
    return subprocess.run([sys.executable, "-m", "forge_core", *command], check=False).returncode
