"""Sounds from a job file, through experts of their own: one curve in one process and under data sharding."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import pytest

from forge_core import Trainer, load_job
from forge_testing.images import VISION_LANGUAGE_JOB
from forge_testing.processes import run_on_ranks

EXPERTS = '{type = "moe", experts = 4, hidden = 16, router = {type = "moma", experts = {text = 2, sound = 2}}}'
KEYS = (
    *("train.steps=4", "train.global_batch_size=4", "train.seq_len=40", "train.precision=fp64", "optimizer.lr=1e-2"),
    *("model.language.layers=2", f"model.language.ffn={EXPERTS}", "model.vision.encoder.size=[32, 16]"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sounds").mkdir()
    for number in range(8):
        samples = 0.5 * np.sin(2 * np.pi * (400, 3000)[number % 2] * np.arange(3200 + 160 * number) / 16000)
        with wave.open(str(tmp_path / f"sounds/{number}.wav"), "wb") as writer:
            writer.setparams((1, 2, 16000, 0, "NONE", ""))
            writer.writeframes((samples * 32767).astype("<i2").tobytes())
        (tmp_path / f"sounds/{number}.txt").write_text(("low", "high")[number % 2])
    (tmp_path / "job.toml").write_text(
        f'{VISION_LANGUAGE_JOB}[[data.sources]]\ntype = "sound_text"\npath = "{tmp_path}/sounds"\n'
    )
    return tmp_path


def lines(folder: Path, name: str, *overrides: str) -> list[dict[str, float]]:
    place = (f"job.name={name}", f"job.output={folder}/runs")
    job = load_job(folder / "job.toml", overrides=(*KEYS, *place, *overrides))
    run = Trainer(job, echo=lambda line: None).run().folder
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if "grad_norm" in record]


def test_sounds_train_alike_under_fsdp(folder, monkeypatch):
    monkeypatch.setenv("FORGE_CACHE", str(folder / "cache"))
    alone = lines(folder, "alone")
    sharded = run_on_ranks(2, lambda rank: lines(folder, "sharded", "parallel.fsdp.shard=2"))[0]
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in sharded] == pytest.approx([line[key] for line in alone], rel=1e-10)
    assert alone[-1]["loss"] < alone[0]["loss"]
