"""From a job file, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_core.cli import main

JOB = """
[job]
name = "latent"
output = "{output}"
[train]
steps = 12
global_batch_size = 4
seq_len = 32
[model]
type = "transformer"
dim = 32
layers = 2
[model.attention]
type = "mla"
heads = 4
q_lora_rank = 24
kv_lora_rank = 16
qk_nope_head_dim = 8
qk_rope_head_dim = 4
v_head_dim = 8
[data.tokenizer]
type = "bytes"
[data.packing]
type = "isolate"
[[data.sources]]
type = "text"
path = "{text}"
[optimizer]
type = "adamw"
lr = 1e-2
"""


def test_a_job_trains_on_packed_documents_and_its_model_generates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text("the cat sat on the mat. " * (1 + number % 4))
    file = tmp_path / "job.toml"
    file.write_text(JOB.format(output=tmp_path / "runs", text=tmp_path / "*.txt"))
    assert main([str(file)]) == 0
    run = tmp_path / "runs" / "latent"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < 0.7 * losses[0]
    capsys.readouterr()
    prompts = ["--prompt", "the cat", "--prompt", "mat. the cat sat", "--max-tokens", "8", "--temperature", "0"]
    assert main(["generate", str(run), *prompts]) == 0
    cached = capsys.readouterr().out
    assert cached.startswith("the cat")
    assert main(["generate", str(run), *prompts, "--no-cache"]) == 0
    assert capsys.readouterr().out == cached
