"""`forge-run ladder check-coordinates`: flat with the plugin, growing without, on a model of each kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from forge_core.cli import main
from forge_plugin_mup import MuP
from forge_plugin_mup.coordinates import CHANGE, START, UPDATE, Trend, exponent, sizes_of

JOB = """
[train]
steps = 100
global_batch_size = 8
seq_len = 16
grad_clip_norm = 0.0

[model]
type = "transformer"
dim = 64
layers = 3
vocab_size = 32
attention.heads = 8
ffn.hidden = 128

[optimizer]
type = "adamw"
lr = 1e-2

[scheduler]
type = "cosine"
warmup_steps = 50

[[data.sources]]
type = "forge_testing:Numbers"
"""
PLUGIN = """
[plugins.mup]
base.dim = 16
base.layers = 2
base.attention.heads = 2
base.ffn.hidden = 32
"""
OPTIONS = ("--widths=1,4", "--depths=1,4", "--steps=3", "--json")


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command on a job, and returns its code and the exponents."""
    monkeypatch.chdir(tmp_path)

    def run(job: str, *options: str) -> tuple[int, Mapping[tuple[str, str, str], Mapping[str, Any]]]:
        Path("job.toml").write_text(job)
        code = main(["ladder", "check-coordinates", "job.toml", *options])
        found = json.loads(capsys.readouterr().out)
        return code, {(row["axis"], row["quantity"], row["what"]): row for row in found["trends"]}

    return run


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_activations_and_logits_are_flat_with_the_plugin(check: Any, optimizer: str) -> None:
    """Whatever sizes and schedule the job itself has: the base is the smallest size."""
    rate = {"adamw": 1e-2, "muon": 2e-2}[optimizer]
    code, trends = check(JOB + PLUGIN, *OPTIONS, f"--optimizer.type={optimizer}", f"--optimizer.lr={rate}")
    assert code == 0
    sizes = {key: row["exponent"] for key, row in trends.items() if key[1:] != ("logits", START) and key[2] != UPDATE}
    assert all(abs(exponent) < 0.25 for exponent in sizes.values())
    # Rates are 1 / m, and elements 1 / sqrt(m) at the start: -1/2, and less as soon as weights are made of updates
    if optimizer == "adamw":
        assert -0.55 < trends["width", "matrix", UPDATE]["exponent"] < -0.2
        assert trends["width", "norm", UPDATE]["exponent"] == pytest.approx(0, abs=0.1)
    assert trends["width", "logits", START]["exponent"] == pytest.approx(-0.5, abs=0.15)
    assert Path("coordinates.png").stat().st_size > 10_000


def test_they_grow_without_it_and_the_command_fails(check: Any) -> None:
    code, trends = check(JOB + PLUGIN, *OPTIONS, "--without", "--out=plain.svg", "--optimizer.lr=0.03")
    assert code == 1
    assert trends["width", "logits", CHANGE]["exponent"] > 0.4
    assert trends["width", "last layer", CHANGE]["exponent"] > 0.5
    assert trends["depth", "last layer", CHANGE]["exponent"] > 0.25
    assert trends["width", "logits", CHANGE]["fault"] == "grows"
    assert Path("plain.svg").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("changes", "path"),
    [("", "plugins"), (PLUGIN.replace("base.layers = 2\n", ""), "plugins.mup.base")],
)
def test_a_job_that_does_not_say_what_grows_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: str, path: str
) -> None:
    (tmp_path / "job.toml").write_text(JOB + changes)
    assert main(["ladder", "check-coordinates", str(tmp_path / "job.toml"), f"--out={tmp_path}/a.png"]) == 2
    assert capsys.readouterr().err.startswith(f"{path}: ")


def test_exponents_and_faults_follow_from_values() -> None:
    assert exponent((1, 2, 4), (3, 6, 12)) == pytest.approx(1)
    assert exponent((1, 2, 4), (0, 0, 0)) == 0

    def trend(quantity: str, what: str, *values: float) -> Trend:
        return Trend("width", (1, 2), quantity, what, values, exponent((1, 2), values))

    assert trend("last layer", CHANGE, 1, 0.5).fault(0.25) == "vanishes"
    assert trend("logits", START, 1, 0.5).fault(0.25) == ""
    assert trend("logits", CHANGE, 1, 0.5).fault(0.25) == "vanishes"
    assert trend("logits", START, 1, 2).fault(0.25) == "grows"
    assert trend("last norm", CHANGE, 1, float("nan")).fault(0.25) == "grows"
    assert trend("last norm", CHANGE, 1, 1.1).fault(0.25) == ""
    assert trend("matrix", UPDATE, 1, 3).fault(0.25) == trend("matrix", UPDATE, 1, 0.3).fault(0.25) == ""
    assert trend("matrix", UPDATE, 1, float("inf")).fault(0.25) == "grows"


def test_whole_numbers_of_the_base_grow_and_all_else_stays() -> None:
    base = {"dim": 8, "layers": 2, "attention": {"heads": 1, "bias": True}, "logit_scale": 1.0}
    wanted = {"dim": 32, "layers": 6, "attention": {"heads": 4, "bias": True}, "logit_scale": 1.0}
    assert sizes_of(MuP(base=base), 4, 3) == wanted
