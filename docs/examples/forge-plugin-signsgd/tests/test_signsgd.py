"""signSGD by itself, and inside a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from forge_plugin_signsgd import SignSGD
from forge_plugin_signsgd.optimizer import SignSGDOptimizer

from forge_core import Trainer
from forge_core.testing import tiny_job


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def test_every_weight_moves_by_the_rate_against_the_sign_of_its_gradient() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))
    optimizer = SignSGDOptimizer([{"params": [weight]}], lr=0.25, momentum=0.0)
    weight.grad = torch.tensor([8.0, -0.5, 0.0])
    optimizer.step()
    assert weight.tolist() == [0.75, 1.25, 1.0]


def test_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="'lr' must be > 0"):
        SignSGD(lr=0.0)


def test_the_loss_falls(tmp_path: Path) -> None:
    summary = Trainer(tiny_job(str(tmp_path), optimizer=SignSGD(lr=3e-3), steps=40)).run()
    curve = losses(summary.folder)
    assert sum(curve[-4:]) < sum(curve[:4])


def test_a_run_that_stops_and_continues_has_the_same_curve(tmp_path: Path) -> None:
    optimizer = SignSGD(lr=3e-3)
    whole = Trainer(tiny_job(str(tmp_path / "whole"), optimizer=optimizer, steps=8)).run()
    Trainer(tiny_job(str(tmp_path / "parts"), optimizer=optimizer, steps=4)).run()
    parts = Trainer(tiny_job(str(tmp_path / "parts"), optimizer=optimizer, steps=8)).run()
    assert losses(parts.folder) == losses(whole.folder)
