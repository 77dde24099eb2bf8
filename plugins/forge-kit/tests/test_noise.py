"""Noise for tokens: uniform, and the same on every layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forge_kit.nn.noise import token_noise

ROUTER = """
import torch
from attrs import frozen

from forge_core import RouterComponent
from forge_kit.nn.modules import Linear
from forge_kit.nn.noise import token_noise


class Gate(torch.nn.Module):
    experts_per_token = 2

    def __init__(self, dim, experts, name):
        super().__init__()
        self.scores, self.name = Linear(dim, experts), name

    def forward(self, x, batch):
        scores = self.scores(x)
        if self.training:
            with open("draws", "a") as file:
                file.write("".join(f"{draw}\\n" for draw in batch["draw"].tolist()))
            scores = scores + token_noise(batch, scores.shape[-1], self.name).to(scores.dtype)
        scores, experts = scores.topk(2)
        return scores.softmax(-1), experts


@frozen(kw_only=True)
class Noisy(RouterComponent):
    def build(self, context, dim, experts):
        return Gate(dim, experts, f"layer {context.layer}")
"""
JOB = """
train = { steps = 4, global_batch_size = 8, seq_len = 8, precision = "fp64" }
model = { type = "forge_testing:RoutedModel", router = { type = "./noisy.py:Noisy" } }
optimizer = { type = "forge_testing:TinyAdamW" }
data.sources = [{ type = "forge_testing:Numbers" }]
"""


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Losses of each step of the job with this command line."""
    monkeypatch.chdir(tmp_path)
    Path("noisy.py").write_text(ROUTER)
    Path("job.toml").write_text(JOB)

    def run(name: str, *arguments: str) -> list[float]:
        Path("draws").unlink(missing_ok=True)
        command = [sys.executable, "-m", "forge_core", "job.toml", f"--job.name={name}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        lines = map(json.loads, Path(f"runs/{name}/metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    return run


def test_micro_batches_and_ranks_draw_the_same(losses) -> None:
    def draws() -> set[str]:
        return set(Path("draws").read_text().split())

    one, of_one = losses("one"), draws()
    assert len(of_one) == 4 * 8  # one for each step and sequence
    assert losses("halves", "--train.micro_batch_size=2") == pytest.approx(one, abs=1e-12)
    assert losses("ranks", "--nproc=2", "--train.micro_batch_size=2") == pytest.approx(one, abs=1e-12)
    assert draws() == of_one
    assert losses("seed", "--job.seed=7", "--data.seed=42") != pytest.approx(one, abs=1e-3)


def batch(rows: int = 4, length: int = 64) -> dict[str, torch.Tensor]:
    ids = torch.randint(1000, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "draw": torch.arange(rows) + 12345}


def test_it_is_uniform() -> None:
    noise = token_noise(batch(64, 128), 8, "here")
    assert noise.shape == (64, 128, 8)
    assert noise.dtype == torch.float32
    assert noise.min() >= 0
    assert noise.max() < 1
    counts = torch.histc(noise, 64, 0, 1)
    expected = noise.numel() / 64
    assert ((counts - expected).square() / expected).sum() < 120  # chi-squared of 63 degrees: 120 has p = 2e-5
    flat = noise.flatten(0, 1) - 0.5
    correlations = (flat.T @ flat / len(flat) * 12).fill_diagonal_(0).abs()
    assert correlations.max() < 0.06  # columns of a token; 5 standard deviations of 8192 draws


def test_rows_positions_names_and_draws_differ() -> None:
    here = batch()
    noise = token_noise(here, 4, "here")
    assert len(noise.flatten().unique()) > 0.999 * noise.numel()
    for other in (token_noise(here, 4, "there"), token_noise({**here, "draw": here["draw"] + 4}, 4, "here")):
        assert (noise == other).float().mean() < 0.001


def test_a_part_of_the_sequence_draws_what_the_whole_does() -> None:
    whole = batch()
    part = {"input_ids": whole["input_ids"][:, 32:], "positions": torch.arange(32, 64).expand(4, -1)}
    noise = token_noise({**whole, **part}, 4, "here")
    assert torch.equal(noise, token_noise(whole, 4, "here")[:, 32:])


def test_it_compiles_to_the_same() -> None:
    compiled = torch.compile(token_noise, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(batch(), 4, "here"), token_noise(batch(), 4, "here"))
