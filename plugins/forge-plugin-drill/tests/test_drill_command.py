"""What a drill refuses, what it leaves out, and how it compares, without a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from forge_core.cli import main
from forge_core.contracts.errors import ForgeError
from forge_plugin_drill.course import Course, cases_of
from forge_plugin_drill.faults import FAULTS, flip_bit
from forge_plugin_drill.results import deviation, first_difference
from forge_plugin_drill.subject import prepare
from forge_testing import TINY_JOB

JOB = '[job]\nname = "tiny"\n' + TINY_JOB.replace("steps = 4", "steps = 500")


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny job in an empty current directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def subject(*overrides, ranks=2, steps=12):
    return prepare(["job.toml"], overrides, ranks, steps, None)


def course():
    return Course(subject=subject(), patience_s=1, show=print)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only=frozn"], "no fault is called 'frozn'; did you mean 'frozen'?"),
        (["--only=killed-7"], "killed-7 is no fault of this job on 1 ranks: killed-0"),
        (["--only=frozen"], "frozen: one process: there is no other rank to notice it"),
        (["--train.steps=5"], "train.steps: 5: a drill takes at least 6 steps"),
        (["--optimizer.lrr=1"], "optimizer.lrr: unknown key"),
    ],
)
def test_what_cannot_be_drilled_is_refused_and_leaves_nothing(arguments, words, capsys):
    assert main(["drill", "job.toml", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in Path.cwd().iterdir()] == ["job.toml"]


def test_a_drill_is_not_started_on_ranks(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["drill", "job.toml"]) == 2
    assert "start it once, without torchrun or srun" in capsys.readouterr().err


def test_every_fault_is_either_drilled_or_has_a_reason():
    cases, refused = cases_of(subject(), [])
    assert {case.fault.name for case in cases} | set(refused) == set(FAULTS)
    assert all(refused.values())
    assert [case.key for case in cases][:4] == ["killed-0", "killed-1", "frozen-0", "frozen-1"]


def test_faults_can_be_named_with_a_rank():
    cases, _ = cases_of(subject(), ["frozen-1", "second-signal", "killed"])
    assert [case.key for case in cases] == ["killed-0", "killed-1", "frozen-1", "second-signal-0"]


def test_a_job_keeps_its_components_and_gets_a_folder_of_its_own(job):
    made = subject("job.name=mine", "optimizer.lr=0.5")
    base, layer = made.write("killed-0", {"steps": 12}, {"launch.hang_timeout_s": 20.0})
    assert made.folder == Path("runs/mine.drill")
    assert 'type = "forge_testing:TinyModel"' in base.read_text()
    assert "lr = 0.5" in base.read_text()
    assert "hang_timeout_s = 20.0" in layer.read_text()
    assert made.run_folder("killed-0") == Path("runs/mine.drill/runs/mine-drill-killed-0")


def test_checkpoints_in_a_folder_of_all_runs_are_not_touched(tmp_path):
    made = subject(f'checkpoint.storage={{type = "local", folder = "{tmp_path}/shared"}}')
    assert made.tables["checkpoint"]["storage"] == {"type": "forge-run/local"}
    assert f"and not in {tmp_path}/shared" in made.changes[-1]


def test_a_folder_that_is_no_drill_is_left_alone():
    made = course()
    made.subject.folder.mkdir(parents=True)
    (made.subject.folder / "thesis.tex").touch()
    with pytest.raises(ForgeError, match=r"--output .*is not empty"):
        made.open()
    assert (made.subject.folder / "thesis.tex").exists()


def test_the_folder_of_an_earlier_drill_is_replaced_but_not_that_of_one_under_way():
    first = course()
    first.open()
    (first.subject.folder / "old").touch()
    first.open()
    assert not (first.subject.folder / "old").exists()
    (first.subject.folder / "drill.json").write_text(json.dumps({"process": 1}))
    with pytest.raises(ForgeError, match="in use by the drill of process 1"):
        first.open()


def test_curves_are_compared_to_the_bit():
    curve = {1: 2.0, 2: math.nan, 3: 1.0}
    assert first_difference(curve, dict(curve)) is None
    assert first_difference(curve, {**curve, 3: math.nextafter(1.0, 2.0)}) == 3
    assert first_difference(curve, {1: 2.0, 2: math.nan}) == 3
    assert deviation(curve, {**curve, 3: 1.5}) == pytest.approx(1 / 3)
    assert deviation(curve, {1: 2.0}) == math.inf
    assert deviation(curve, {**curve, 2: 1.0}) == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_a_flipped_bit_changes_the_largest_element_by_256(dtype):
    tensor = torch.tensor([[0.5, -1.5], [0.25, 1.0]], dtype=dtype)
    flip_bit(tensor)
    assert tensor[0, 1].abs().log2().sub(math.log2(1.5)).abs().item() == 8
    assert tensor.flatten()[[0, 2, 3]].tolist() == [0.5, 0.25, 1.0]
