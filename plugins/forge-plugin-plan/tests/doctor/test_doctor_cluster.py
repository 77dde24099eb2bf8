"""`forge-run doctor --on`: a run that checks all ranks of a cluster together."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forge_core.cli import main
from forge_plugin_plan.doctor import cluster_trial, command
from forge_plugin_plan.doctor.cluster_check import _restored
from forge_plugin_plan.doctor.cluster_trial import World, check_clocks, check_collectives, check_storage, join
from forge_plugin_plan.doctor.rank import COLLECTIVES
from forge_plugin_plan.doctor.results import State, failed, ok, warning
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import lacks
from forge_testing.tiny import TINY_JOB

# A cluster that is this machine, and has the run finished when it was submitted
HERE = """
import subprocess
import sys

from attrs import frozen

from forge_plugin_launch import Cluster, Status


@frozen(kw_only=True)
class Here(Cluster):
    def rendered(self, run):
        return f"-m forge_core run {' '.join(run.words)} --nproc={self.ranks_per_node}\\n"

    def submit(self, run):
        subprocess.run([sys.executable, *self.rendered(run).split()], check=True, stdout=subprocess.DEVNULL)
        return [f"{run.name}: started"]

    def status(self, run):
        return Status(state="finished", words="ended")

    def logs(self, run, follow):
        print("its output")
        return 0
"""
CLUSTER = '[cluster]\ntype = "./here.py:Here"\ngpus_per_node = 2\n'


@pytest.fixture
def cluster(here: Path) -> Path:
    (here / "here.py").write_text(HERE)
    (here / "here.toml").write_text(CLUSTER)
    (here / "slurm.toml").write_text("[cluster]\nnodes = 2\ntasks_per_node = 2\n")
    return here


@pytest.mark.slow
def test_every_rank_of_a_sound_cluster_is_ok(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--on=here.toml", "--output=elsewhere", "--wait=1", "--json"])
    report = json.loads(capsys.readouterr().out)
    states = {check["name"]: check["state"] for check in report["checks"]}
    names = {f"gloo: {name}" for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")}
    names |= {"gloo: send_receive", "clocks", "one folder", "fsync", "rename", "flock", "mmap", "clock"}
    assert states.keys() == names | {"save and restore"}
    # A slow disk is a warning
    assert {state for name, state in states.items() if name != "fsync"} == {"ok"}
    assert (code, report["ranks"], len(report["hosts"])) == (0, 2, 1)
    [folder] = (cluster / "elsewhere").iterdir()
    assert not (folder / "doctor").exists()


SOUND = {"gloo: all_reduce": "ok", "clocks": "ok", "one folder": "ok"}
FAULTS = {
    "": SOUND,
    "sums": SOUND | {"gloo: all_reduce": "failed"},
    "clocks": SOUND | {"clocks": "warning", "clock": "warning"},
    "folders": SOUND | {"one folder": "failed"},
}


@pytest.mark.parametrize(("fault", "expected"), FAULTS.items())
def test_a_fault_of_one_machine_is_found_by_all(
    here: Path, monkeypatch: pytest.MonkeyPatch, fault: str, expected: dict[str, str]
) -> None:
    """Two ranks, each of which believes to be on a machine with another name."""
    monkeypatch.setattr(cluster_trial, "VISIBLE_S", 0.3)
    monkeypatch.setattr(cluster_trial, "COLLECTIVES", {"all_reduce": COLLECTIVES["all_reduce"]})
    real_sum, real_time = dist.all_reduce, time.time

    def wrong_sum(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        done = real_sum(tensor, *args, **kwargs)
        tensor[0] += 1
        return done

    def on_rank(rank: int) -> list[tuple[str, str]]:
        monkeypatch.setattr(socket, "gethostname", lambda: f"host{rank}")
        folder = here / "runs"
        if rank == 1 and fault == "sums":
            monkeypatch.setattr(dist, "all_reduce", wrong_sum)
        elif rank == 1 and fault == "clocks":
            monkeypatch.setattr(time, "time", lambda: real_time() + 5)
        elif rank == 1 and fault == "folders":
            folder = here / "other"
        world = join()
        found = [*check_collectives(world, torch.device("cpu")), *check_clocks(world), *check_storage(world, folder)]
        return [(result.name, result.state.value, result.seen) for _, result in found]

    first, second = run_on_ranks(2, on_rank)
    states = {name: state for name, state, _ in first if name not in ("fsync", "rename", "flock", "mmap")}
    assert states == {"clock": "ok", **expected}, first
    assert first == second or fault == "folders"
    bad = " ".join(seen for _, state, seen in first if state in ("failed", "warning"))
    assert ("host1" in bad or "rank 1" in bad) == bool(fault)
    assert not (here / "runs/doctor").exists()


def test_what_would_be_submitted_is_printed_and_nothing_is_written(cluster: Path, capsys) -> None:
    before = {path.name for path in cluster.iterdir()}
    assert main(["doctor", "--on=slurm.toml", "--print"]) == 0
    script = capsys.readouterr().out
    assert not lacks(script, "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=2", "run doctor.toml")
    assert {path.name for path in cluster.iterdir()} == before


def test_a_report_that_is_elsewhere_is_read_in_the_logs(cluster: Path, capsys) -> None:
    (cluster / "here.py").write_text(HERE.replace("subprocess.run(", "0 and subprocess.run("))
    assert main(["doctor", "--on=here.toml", "--wait=1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "its output"
    assert main(["doctor", "--on=here.toml", "--wait=1", "--json"]) == 2


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--print"], ["--print", "--on"]),
        (["--wait=2"], ["--wait", "--on"]),
        (["--on=slurm.toml", "--nproc=4", "--print"], ["--nproc", "--on"]),
        (["--on=slurm.toml", "--wait=1", "--print"], ["--wait", "--print"]),
        (["--on=slurm.toml", "--json"], ["--json", "--wait"]),
        (["--cluster.nodes=2"], ["cluster.nodes=2", "--on"]),
        (["--on=slurm.toml", "--cluster.nodse=2", "--print"], ["cluster.nodse", "'nodes'"]),
        (["--on=slurm.toml", "job.toml", "--cluster.nodes=3", "--print"], ["train.global_batch_size"]),
    ],
)
def test_what_cannot_be_checked_is_refused(cluster: Path, capsys, words: list[str], facts: list[str]) -> None:
    (cluster / "job.toml").write_text(TINY_JOB)
    assert main(["doctor", *words]) == 2
    assert not lacks(capsys.readouterr().err, *facts)


def test_a_file_of_the_users_stays(cluster: Path, capsys) -> None:
    (cluster / "doctor.toml").write_text("[job]\n")
    assert main(["doctor", "--on=slurm.toml", "--print"]) == 2
    assert "doctor.toml" in capsys.readouterr().err
    assert (cluster / "doctor.toml").read_text() == "[job]\n"


def test_without_the_kind_of_clusters_its_distribution_is_named(cluster: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert main(["doctor", "--on=slurm.toml", "--print"]) == 2
    assert "pip install forge-plugin-launch" in capsys.readouterr().err


WORLD = World(rank=0, hosts=("a", "a", "b", "b"))


def test_a_machine_with_another_folder_is_named() -> None:
    assert WORLD.firsts == {"a": 0, "b": 2}
    blind = cluster_trial._one_folder(WORLD, Path("/mnt/runs"), {"a": 0.1, "b": "a"})
    assert (blind.state, lacks(blind.seen, "b does not see in /mnt/runs what a wrote")) == (State.FAILED, [])
    assert cluster_trial._one_folder(WORLD, Path("/mnt/runs"), {"a": 0.1, "b": 3.0}).state is State.WARNING
    assert cluster_trial._one_folder(WORLD, Path("/mnt/runs"), {"a": 0.1, "b": 0.2}).state is State.OK


def test_the_worst_machine_counts() -> None:
    worst = cluster_trial._worst({"a": ok("fsync", "fast"), "b": warning("fsync", "slow", "x"), "c": ok("fsync", "ok")})
    assert (worst.state, worst.seen) == (State.WARNING, "b: slow")
    assert cluster_trial._worst({"a": ok("fsync", "fast"), "b": failed("fsync", "lost", "x")}).seen == "b: lost"


def test_a_run_that_did_not_save_restored_nothing() -> None:
    assert _restored([("1", "1"), ("2", "3")], ("a", "b"), 0.1).state is State.FAILED
    assert _restored([("", ""), ("", "")], ("a", "b"), 0.1).state is State.NOT_RUN
