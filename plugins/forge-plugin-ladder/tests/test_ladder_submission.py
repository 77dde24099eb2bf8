"""`forge-run ladder submit`, with stand-ins for SLURM's commands."""

from __future__ import annotations

import importlib.util
import json
import math
import shlex
from pathlib import Path

import pytest

from forge_core.cli import main
from forge_core.contracts.errors import ExitCode, JobError
from forge_plugin_ladder import command as module
from forge_plugin_ladder.command import command
from forge_plugin_ladder.points import read_points

JOB = """
[train]
steps = 9
global_batch_size = 2
seq_len = 8
device = "cpu"
[model]
type = "forge_testing:TinyModel"
[[data.sources]]
type = "forge_testing:Numbers"
[optimizer]
type = "adamw"
[scheduler]
type = "wsd"
"""
LADDER = """
job = "job.toml"
output = "rungs"
trunk = true
[sizes.small]
dim = 8
[budgets]
tokens = [80, 800]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "ladder.toml").write_text(LADDER)
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    # The first array is job 17, the next one 18
    program("sbatch", "echo x >> count; echo $((16 + $(wc -l < count)))")
    program("squeue", "echo 'PENDING|Priority|'")
    return tmp_path


def program(name, text):
    path = Path("bin") / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def directives(path):
    return [line for line in Path(path).read_text().splitlines() if line.startswith("#SBATCH")]


def words_of(run):
    """What the batch script of a run makes `forge-run run` train."""
    return shlex.split(Path(f"rungs/runs/{run}/submit.sh").read_text().split("-m forge_core run ")[1])


def test_data_that_only_the_nodes_have_are_left_to_them(here, capsys):
    source = '[[data.sources]]\ntype = "text"\npath = "/nodes/text"\n[data.tokenizer]\ntype = "bytes"\n'
    Path("job.toml").write_text(JOB.replace('[[data.sources]]\ntype = "forge_testing:Numbers"\n', source))
    with pytest.raises(JobError, match="/nodes/text"):
        command(["submit", "ladder.toml"])
    Path("slurm.toml").write_text('[cluster]\ntype = "slurm"\nnode_paths = ["/nodes"]\n')
    assert command(["submit", "ladder.toml", "--on", "slurm.toml"]) == ExitCode.FINISHED
    assert "small-800-tokens: job 17_0" in capsys.readouterr().out


def test_trunks_are_queued_first_and_their_branches_behind_them(here, capsys):
    assert command(["submit", "ladder.toml", "--time=1:00:00", "--", "--qos=high"]) == ExitCode.FINISHED
    assert "small-800-tokens: job 17_0" in capsys.readouterr().out
    trunk, branch = (directives(f"rungs/runs/small-{tokens}-tokens-array.sh") for tokens in (800, 80))
    assert {"#SBATCH --time=1:00:00", "#SBATCH --qos=high"} < set(trunk)
    assert "#SBATCH --dependency=afterany:17" in branch
    assert not [line for line in trunk if "dependency" in line]
    # Its own script is queued again by SLURM, when job 17 may be forgotten
    assert not [line for line in directives("rungs/runs/small-80-tokens/submit.sh") if "dependency" in line]
    # What is queued is not queued again
    assert command(["submit", "ladder.toml"]) == ExitCode.FINISHED
    assert capsys.readouterr().out.splitlines() == [
        "small-80-tokens: queued already, as job 18_0",
        "small-800-tokens: queued already, as job 17_0",
        "nothing to queue",
    ]
    # As their tasks do
    for name in ("small-800-tokens", "small-80-tokens"):
        assert main(words_of(name)) == ExitCode.FINISHED
    assert "continuing from rungs/runs/small-800-tokens/checkpoints/step-4, step 4" in capsys.readouterr().out
    assert command(["run", "ladder.toml"]) == ExitCode.FINISHED
    assert capsys.readouterr().out == "", "nothing is left to train"
    points = read_points(here / "rungs/points.json")
    assert [(point.usable, point.trunk) for point in points] == [(True, "small-800-tokens"), (True, "")]
    # 64 sequences of 8 tokens, of which the longer run repeats most
    assert [point.unique_tokens for point in points] == [math.inf, 512]
    # The law of another metric, and a second step that no evaluation has measured
    (here / "ladder.toml").write_text('metric = "eval/perplexity"\n' + LADDER)
    assert command(["run", "ladder.toml"]) == ExitCode.FINISHED
    assert [math.log(point.loss) for point in read_points(here / "rungs/points.json")] == pytest.approx(
        [point.loss for point in points]
    )
    (here / "ladder.toml").write_text('accuracy = "eval/acc"\n' + LADDER)
    assert command(["run", "ladder.toml"]) == ExitCode.FINISHED
    assert "small-80-tokens: no eval/acc in its last evaluation; its point is marked" in capsys.readouterr().out


def test_a_run_that_failed_is_queued_again_and_its_point_marked(here, capsys):
    assert command(["submit", "ladder.toml"]) == ExitCode.FINISHED
    assert main([*words_of("small-800-tokens"), "--train.non_finite=stop", "--optimizer.lr=1e30"]) != ExitCode.FINISHED
    program("squeue", "exit 0")
    capsys.readouterr()
    assert command(["submit", "ladder.toml", "--print"]) == ExitCode.FINISHED
    out = capsys.readouterr().out
    assert out.count("--dependency=afterany:JOB") == 1
    assert "--array=0-0" in out
    assert (here / "count").read_text() == "x\nx\n", "a dry run queues nothing"
    with pytest.raises(JobError, match="0 of 2 points have a loss"):
        command(["fit", "ladder.toml"])
    ends = {name: run["ended"] for name, run in json.loads(Path("rungs/comparison.json").read_text())["runs"].items()}
    assert ends == {"small-800-tokens": "exit code 76", "small-80-tokens": "queued"}
    # A branch whose trunk has ended starts from what that has saved
    (here / "ladder.toml").write_text(LADDER.replace("[80, 800]", "[80]"))
    assert command(["submit", "ladder.toml", "--print"]) == ExitCode.FINISHED
    assert "--resume" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["submit", "ladder.toml", "--", "--array=0-3"], "forge-run submit sets it itself"),
        (["submit", "ladder.toml", "--time=soon"], "time"),
        (["plan", "ladder.toml", "--", "--qos=high"], "which `ladder submit` takes"),
    ],
)
def test_wrong_options_are_named(here, words, message):
    with pytest.raises(JobError, match=message):
        command(words)
    assert not (here / "rungs").exists()


def test_what_is_missing_is_named(here, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "forge_plugin_launch" else found(name))
    with pytest.raises(JobError, match=r"by forge-plugin-launch, which is not installed\n.*pip install"):
        command(["submit", "ladder.toml", "--on=cluster.toml"])
