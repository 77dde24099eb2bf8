"""The program for Ray of the page about more than one machine, where Ray is installed."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from pathlib import Path

import fences
import pytest

from forge_core.cli import main

pytest.importorskip("ray", reason="needs Ray: pip install ray")

PAGE = fences.ROOT / "docs/how-to/more-than-one-machine.md"


@pytest.mark.slow
def test_parts_on_ray_have_the_bytes_of_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fences.write_files([fence for fence in fences.ALL if fence.page == PAGE], tmp_path)
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "texts.py"], check=True)
    corpus = str(tmp_path / "corpus")
    train = ["--tokenizer", "bpe", "--tokenizer.vocab_size=512", "--workers", "1"]
    assert main(["data", "prepare", "corpus/json.jsonl", "--out", "tokenizer", *train]) == 0
    subprocess.run([sys.executable, "parts_on_ray.py"], check=True, timeout=600)
    options = ["--tokenizer", "prepared", f"--tokenizer.path={tmp_path / 'tokenizer'}", "--held-out-every", "10"]
    assert main(["data", "prepare", corpus, "--out", "whole", *options, "--workers", "1"]) == 0
    names = sorted(str(path.relative_to("whole")) for path in Path("whole").rglob("*") if path.is_file())
    assert filecmp.cmpfiles("whole", "data", names, shallow=False) == (names, [], [])
