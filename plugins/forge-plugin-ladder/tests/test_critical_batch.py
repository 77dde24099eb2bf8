"""The critical batch size: branches over the same samples, and where the loss departs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from forge_core.cli import main
from forge_plugin_ladder.critical_batch import Branch, critical

JOB = """
[job]
name = "trunk"
output = "{out}"
[train]
steps = 24
global_batch_size = 2
seq_len = 8
{more}
[checkpoint]
interval = 8
keep = 0
[model]
type = "forge_testing:TinyModel"
[optimizer]
type = "forge_testing:TinyAdamW"
[[data.sources]]
type = "forge_testing:Numbers"
[plugins.noise_scale]
interval = 4
smoothing = 0.0
"""


def lines_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(line["tokens"], line["loss"]) for line in lines_of(folder) if "loss" in line]


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    (out / "job.toml").write_text(JOB.format(out=out, more=""))
    assert main(["run", str(out / "job.toml")]) == 0
    return out / "trunk"


def test_branches_train_on_the_same_samples_and_the_first_is_the_run(trunk: Path, tmp_path: Path, capsys) -> None:
    """From step 8 on, 64 tokens: four steps of 2 sequences, or two of 4. The loss counts the last 32 tokens."""
    options = [str(trunk), "--step=8", "--factors", "1", "2", "--tokens=50", f"--out={tmp_path}/out"]
    assert main(["ladder", "critical-batch", *options, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    one, two = facts["branches"]
    assert (one["steps"], two["steps"], two["batch"], two["rate_factor"]) == (4, 2, 4, math.sqrt(2))
    of_trunk = dict(losses(trunk))
    branch = losses(tmp_path / "out/runs/batch-1x")
    assert branch == [(tokens, of_trunk[tokens]) for tokens in (144, 160, 176, 192)]
    assert one["loss"] == pytest.approx((of_trunk[176] + of_trunk[192]) / 2, rel=1e-12)
    twice = dict(losses(tmp_path / "out/runs/batch-2x"))
    assert list(twice) == [160, 192]
    # Its first step has the weights of the checkpoint, and the samples of two of the run's steps
    assert two["loss"] == twice[192]
    rates = [json.loads(line) for line in (tmp_path / "out/runs/batch-2x/metrics.jsonl").read_text().splitlines()]
    assert rates[0]["lr"] == pytest.approx(1e-2 * math.sqrt(2))
    # The same command reads what is there
    assert main(["ladder", "critical-batch", *options]) == 0
    *_, shown, beside = capsys.readouterr().out.splitlines()
    is_within = two["loss"] <= one["loss"] + 0.01
    assert (facts["critical_batch"], facts["is_bound"]) == ((4, True) if is_within else (2, False))
    least = "at least 4 sequences (32 tokens), the largest that was tried"
    below = "2 sequences (16 tokens), within 0.01 nats of the run's own loss"
    assert shown == f"critical batch at step 8: {least if is_within else below}"
    # What the run itself has logged up to the checkpoint, and not later
    noise = next(line for line in lines_of(trunk) if line["step"] == 8)["stats/noise_scale"]
    assert facts["noise_scale"] == noise
    assert beside == f"gradient noise scale that the run logged: {noise:,.0f} tokens"


def branch(factor: int, loss: float) -> Branch:
    return Branch(factor=factor, batch=4 * factor, rate_factor=1.0, steps=8, loss=loss)


def test_the_critical_batch_is_the_last_before_the_loss_departs() -> None:
    """A later branch that is good again by chance does not count, nor does one that diverged."""
    assert critical([branch(1, 3.0), branch(2, 3.009), branch(4, 3.02), branch(8, 3.0)], 0.01).batch == 8
    assert critical([branch(1, 3.0), branch(2, 2.9), branch(4, math.nan)], 0.01).batch == 8
    assert critical([branch(1, 3.0), branch(2, 3.5)], 0.01).batch == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--step=7"], "--step 7: {run} has no such checkpoint; it has steps 8, 16, 24"),
        (["--factors", "2", "4"], "--factors 2 4: must ascend from 1"),
        (["--step=16", "--tokens=500"], "the branch 1x would end at step 48, and train.steps is 24"),
    ],
)
def test_what_cannot_branch_is_refused(trunk: Path, tmp_path: Path, capsys, options: list[str], words: str) -> None:
    default = [] if "--tokens" in str(options) else ["--tokens=64"]
    assert main(["ladder", "critical-batch", str(trunk), *default, *options, f"--out={tmp_path}/out"]) == 2
    assert words.format(run=trunk) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
