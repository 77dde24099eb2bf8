"""Whole runs on the pretended device: the numbers of the CPU, and no fault of streams or mixed devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from PIL import Image

from forge_pretend import VARIABLE
from forge_testing.pretend import NAME

pytestmark = pytest.mark.slow

TEXT = """
[train]
steps = 6
global_batch_size = 4
seq_len = 32
non_finite = "ignore"
deterministic = true
[data.tokenizer]
type = "bytes"
[[data.sources]]
type = "text"
path = "text"
held_out_list = "held"
[model]
type = "transformer"
dim = 32
layers = 2
attention = { heads = 2 }
vocab_size = 258
[optimizer]
type = "adamw"
[checkpoint]
interval = 3
[eval]
interval = 3
"""
WATCHED = """
[hooks.profile]
start = 2
steps = 1
[hooks.spikes]
[plugins.sdc]
every = 2
[plugins.ema]
[parallel.taps]
interval = 2
[parallel.taps.sinks.store]
[parallel.taps.sinks.statistics]
log = ["mean"]
[parallel.taps.sinks.sae]
latents = 64
"""
IMAGES = """
[train]
steps = 4
global_batch_size = 4
seq_len = 32
[data.tokenizer]
type = "bytes"
[[data.sources]]
type = "image_text"
path = "photos"
held_out_every = 5
[model]
type = "vision_language"
[model.language]
dim = 32
layers = 2
attention = { heads = 2 }
[model.vision.encoder]
type = "vit"
dim = 32
layers = 1
heads = 2
patch = 8
size = [32, 32]
[optimizer]
type = "muon"
[evaluations.held_out]
[evaluations.answers]
max_tokens = 4
"""
OF_TIME = ("time", "seconds", "_s", "_gb", "wait", "counts", "tokens_per_s", "mfu")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text").mkdir()
    for number in range(4):
        (folder / "text" / f"{number}.txt").write_text(f"the {number}th quick brown fox jumps over the lazy dog. " * 40)
    (folder / "held").write_text("text/3.txt\n")
    (folder / "photos").mkdir()
    random = Random(0)
    for number in range(12):
        colour = random.choice(["red", "green", "blue"])
        Image.new("RGB", (random.randint(40, 80), random.randint(40, 80)), colour).save(folder / f"photos/{number}.png")
        (folder / f"photos/{number}.txt").write_text(colour)
    (folder / "text.toml").write_text(TEXT)
    (folder / "watched.toml").write_text(TEXT + WATCHED)
    (folder / "images.toml").write_text(IMAGES)
    return folder


def forge(home: Path, device: str, *arguments: str) -> str:
    """Run a command; on the CPU, in processes that do not have the other device."""
    environment = {**os.environ, VARIABLE: "1" if device == NAME else "0"}
    command = [sys.executable, "-m", "forge_core", *arguments]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def trained(home: Path, job: str, device: str, *options: str, name: str = "") -> list[dict[str, Any]]:
    """The lines of a run, without what is of time or memory."""
    name = name or f"{job}-{device}"
    forge(home, device, f"{job}.toml", "--train.device", device, "--job.name", name, *options)
    lines = [json.loads(line) for line in (home / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not any(word in key for word in OF_TIME)} for line in lines]


@pytest.fixture(scope="module")
def on_cpu(home: Path) -> list[dict[str, Any]]:
    return trained(home, "watched", "cpu")


def same(lines: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [line.keys() for line in lines] == [line.keys() for line in expected]
    for line, other in zip(lines, expected, strict=True):
        assert line == pytest.approx(other, rel=2e-5, abs=1e-6), line.get("step")


def test_a_run_with_all_that_watches_it_is_that_of_the_cpu(home: Path, on_cpu: list[dict[str, Any]]) -> None:
    """Evaluated, saved, stopped and continued, tapped, profiled, checked twice, and averaged."""
    trained(home, "watched", NAME, "--train.stop_after=3")
    lines = trained(home, "watched", NAME)
    same(lines, on_cpu)
    assert {line["step"] for line in lines} == set(range(1, 7))


def test_a_checkpoint_of_one_device_is_read_on_the_other(home: Path, on_cpu: list[dict[str, Any]]) -> None:
    arguments = "generate", "runs/watched-cpu", "--prompt", "the 1", "--max-tokens", "8", "--temperature", "0"
    texts = [forge(home, device, *arguments, "--device", device) for device in ("cpu", NAME)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("layout", ["--parallel.fsdp.reshard_after_forward=true", "--parallel.tp.degree=2"])
def test_two_ranks_have_the_curve_of_one(home: Path, layout: str) -> None:
    alone = trained(home, "text", NAME)
    ranks = trained(home, "text", NAME, "--nproc=2", layout, name=f"text-{layout[11:13]}")
    same(ranks, alone)


def test_images_train_and_are_answered(home: Path) -> None:
    same(trained(home, "images", NAME), trained(home, "images", "cpu"))
