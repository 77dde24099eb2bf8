"""Runs on a real SLURM: controller, two nodes and munge of their own, on this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from slurm_cluster import SlurmCluster, missing

from forge_core import Trainer
from forge_plugin_launch.slurm.records import SlurmAttempt, read_attempts
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import lacks
from forge_testing.tiny import TINY_JOB

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

JOB = f"""{TINY_JOB.replace("steps = 4", "steps = 60")}
[job]
name = "NAME"
[checkpoint]
interval = 5
[hooks.pace]
type = "./pace.py:Pace"
"""
PACE = """
import time
from pathlib import Path
from forge_core import TrainingHook

class Pace(TrainingHook):
    '''Holds the run after the step that the file `stay` names, until that file has gone.'''

    def on_step_end(self, context):
        stay = Path("stay")
        while True:
            try:
                if int(stay.read_text()) != context.step:
                    return
            except (OSError, ValueError):
                return
            Path("there").write_text(str(context.step))
            time.sleep(0.02)
"""
TASK = """
import json, os, signal, sys, time
what, run = sys.argv[1], "runs/NAME"
os.makedirs(run + "/slurm", exist_ok=True)
rank, restart = os.environ["SLURM_PROCID"], int(os.environ.get("SLURM_RESTART_COUNT", 0))
if rank == "0":
    facts = {"job": os.environ["SLURM_JOB_ID"], "restart": restart, "began": 0, "saved": 0}
    open(run + "/slurm/progress.json", "w").write(json.dumps(facts))
def end(code, cause, **more):
    table = {"code": code, "cause": cause, "host": "x", "step": 7, "attempt": os.environ["FORGE_ATTEMPT"], **more}
    open(run + "/end.json", "w").write(json.dumps(table))
    os._exit(code)
if what == "wait":
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), end(75, "signal", signal="SIGTERM")))
    open(f"ready{os.environ.get('SLURM_ARRAY_TASK_ID', '')}", "w").close()
    time.sleep(300)
elif what == "by hand":
    signal.signal(signal.SIGUSR1, lambda *_: end(75, "signal", signal="SIGUSR1", reason="signal SIGUSR1"))
    open("ready", "w").close()
    time.sleep(300)
elif what == "error":
    end(1, "failed", reason="ValueError: the flux is out of bounds")
elif what == "fail":
    end(1, "failed", reason=f"trouble of the letter {'abcdefg'[restart]}")
elif what == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
elif what == "killed":
    time.sleep(0.5)
    sys.exit(1)
"""
"""Stands in for a rank where only SLURM's part is looked at: it starts in no time."""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    running = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.toml").write_text(JOB.replace("NAME", "long"))
    (tmp_path / "pace.py").write_text(PACE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def submitted(cluster: SlurmCluster, *words: str) -> str:
    """Submit the job as a user does; returns its number."""
    out = cluster.run("forge-run", "submit", "job.toml", *words, cwd=Path.cwd())
    return re.search(r"job (\d+)", out)[1]


def stand_in(cluster: SlurmCluster, what: str, name: str, *words: str, sbatch: tuple[str, ...] = ()) -> str:
    """Queue the script of a run whose ranks are `TASK`."""
    Path("task.py").write_text(TASK.replace("NAME", name))
    script = cluster.run("forge-run", "submit", "job.toml", f"--job.name={name}", "--print", *words, cwd=Path.cwd())
    script = re.sub(r"-m forge_core run .*", f"task.py {shlex.quote(what)}", script)
    script = re.sub(rf"(/runs/{name}) ", r"\1${SLURM_ARRAY_TASK_ID} ", script)  # each task of an array has its own
    Path(f"runs/{name}/slurm").mkdir(parents=True)
    Path("script.sh").write_text(script)
    return cluster.run("sbatch", "--parsable", *sbatch, "script.sh")


def attempts(name: str = "long") -> list[SlurmAttempt]:
    return read_attempts(Path("runs") / name)


def ends(name: str = "long") -> list[tuple[str, str]]:
    return [(each.kind, each.action) for each in attempts(name)]


def losses(run: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def at_step(cluster: SlurmCluster, step: int, act: Callable[[], object]) -> None:
    """Let the run come to a step, and do something while it is held there."""
    Path("there").unlink(missing_ok=True)
    Path("stay").write_text(str(step))
    cluster.until(lambda: Path("there").exists() and Path("there").read_text() == str(step), f"step {step}")
    act()
    Path("stay").unlink()


def test_a_run_of_two_nodes_survives_preemption_a_killed_task_and_a_node_failure(
    cluster: SlurmCluster, folder: Path
) -> None:
    job = submitted(cluster, "--nodes=2")
    at_step(cluster, 7, lambda: cluster.preempt(job))
    cluster.until(lambda: len(attempts()) == 1, "the end of the first attempt is noted")
    cluster.hasten(job)
    at_step(cluster, 22, lambda: os.kill(cluster.rank(job, 1), signal.SIGKILL))
    cluster.until(lambda: len(attempts()) == 2, "the end of the second attempt is noted")
    cluster.hasten(job)
    at_step(cluster, 33, lambda: cluster.kill_node("node1", noticed=True))
    cluster.until(lambda: cluster.state(job).startswith("PENDING"), "SLURM sees that the node is gone")
    cluster.start_node("node1", again=True)
    cluster.until(lambda: "down" not in " ".join(cluster.node_states()), "the node is back")
    cluster.hasten(job)
    cluster.until(lambda: len(attempts()) == 4, "the run is finished")

    preempted, killed, node, last = attempts()
    assert ends() == [
        ("preempted", "queued again"), ("failed", "queued again"), ("node", "queued again"), ("finished", "ended"),
    ]  # fmt: skip
    assert [(each.job, each.restart) for each in attempts()] == [(job, restart) for restart in range(4)]
    assert (preempted.code, killed.code, node.code, last.code) == (75, 137, None, 0)
    saved = preempted.saved
    assert (preempted.step_began, preempted.step_ended) == (0, saved)
    assert saved in (7, 8)  # saved when it was told, and not at the next interval
    assert (killed.step_began, killed.saved) == (saved, 20)
    assert killed.reason.endswith("task 1 on node2: Killed")
    assert killed.blamed == ("node2",)
    assert (node.step_began, node.saved, last.step_began, last.step_ended) == (20, 30, 30, 60)

    (folder / "alone.toml").write_text(JOB.replace("NAME", "alone"))
    run_on_ranks(2, lambda rank: Trainer("alone.toml", echo=lambda text: None).run().step)
    assert losses(Path("runs/long")) == losses(Path("runs/alone"))  # to the bit

    status = cluster.run("forge-run", "submit", "--status", "runs/long", cwd=folder)
    assert "60 of 60, loss" in status
    assert "finished; ended" in status


def test_the_time_limit_is_noticed_before_it_comes(cluster: SlurmCluster, folder: Path) -> None:
    Path("stay").write_text("12")
    job = submitted(cluster, "--time=1", "--hooks.slurm.margin_s=52")
    cluster.until(lambda: Path("there").exists() or attempts(), "step 12")
    cluster.until(lambda: cluster.facts(job)["RunTime"] > "00:00:08" or attempts(), "the margin is reached")
    Path("stay").unlink()
    cluster.until(attempts, "the end of the attempt is noted")
    cluster.until(lambda: cluster.state(job).startswith("PENDING"), "it is queued again")
    cluster.run("scancel", job)
    [ended] = attempts()
    assert (ended.kind, ended.code, ended.action) == ("time", 75, "queued again")
    assert not lacks(ended.reason, f"job {job}")
    assert ended.saved == ended.step_ended
    assert ended.ended - ended.began < 60


def test_scancel_is_not_undone(cluster: SlurmCluster, folder: Path) -> None:
    job = stand_in(cluster, "wait", "cancelled")
    cluster.until(lambda: Path("ready").exists(), "it runs")
    cluster.run("scancel", job)
    cluster.until(lambda: attempts("cancelled"), "the end is noted")
    assert ends("cancelled") == [("cancelled", "ended")]
    cluster.until(lambda: not cluster.run("squeue", "--noheader", "--jobs", job, check=False), "the job is gone")


def test_a_task_of_an_array_is_queued_again_without_the_others(cluster: SlurmCluster, folder: Path) -> None:
    """The number of one of them is that of the whole array."""
    # As `submit --array` makes them for its runs
    for number in range(2):
        Path(f"runs/array{number}/slurm").mkdir(parents=True)
    array = stand_in(cluster, "wait", "array", sbatch=("--array=0-1",))
    cluster.until(lambda: Path("ready0").exists() and Path("ready1").exists(), "both run")
    cluster.run("scancel", "--signal=TERM", f"{array}_1")
    cluster.until(lambda: attempts("array1"), "the end is noted")
    cluster.until(lambda: cluster.state(f"{array}_1").startswith("PENDING"), "it is queued again")
    assert [(each.job, each.action) for each in attempts("array1")] == [(f"{array}_1", "queued again")]
    assert cluster.state(f"{array}_0").startswith("RUNNING")
    cluster.run("scancel", array)


def test_a_second_job_in_the_folder_of_a_running_one_starts_nothing(cluster: SlurmCluster, folder: Path) -> None:
    first = stand_in(cluster, "wait", "twice")
    cluster.until(lambda: Path("ready").exists(), "it runs")
    second = cluster.run("sbatch", "--parsable", "script.sh")
    cluster.until(lambda: cluster.state(second).startswith("FAILED"), "the second one has ended")
    assert not lacks(Path(f"runs/twice/slurm/{second}.log").read_text(), f"job {first}", "in use")
    assert cluster.state(first).startswith("RUNNING")
    assert attempts("twice") == []
    cluster.run("scancel", first)


def test_a_stop_by_hand_saves_and_stays(cluster: SlurmCluster, folder: Path) -> None:
    job = stand_in(cluster, "by hand", "stopped")
    cluster.until(lambda: Path("ready").exists(), "it runs")
    cluster.run("scancel", "--signal=USR1", job)
    cluster.until(lambda: attempts("stopped"), "the end is noted")
    assert ends("stopped") == [("stopped", "ended")]
    cluster.until(lambda: cluster.state(job).startswith("FAILED"), "the job has ended")


def test_the_same_error_after_the_same_step_ends_the_job(cluster: SlurmCluster, folder: Path) -> None:
    job = stand_in(cluster, "error", "wrong")
    cluster.hasten(job)
    cluster.until(lambda: cluster.state(job).startswith("FAILED"), "the job has ended")
    assert ends("wrong") == [("failed", "queued again"), ("failed", "ended")]
    log = Path(f"runs/wrong/slurm/{job}.log").read_text()
    assert not lacks(log, "step 7", "ValueError: the flux is out of bounds", "the same error")


def test_a_job_that_comes_no_further_is_held(cluster: SlurmCluster, folder: Path) -> None:
    Path("cluster.toml").write_text("[cluster]\nmax_idle_restarts = 1\n")
    job = stand_in(cluster, "fail", "idle", "--on=cluster.toml")
    cluster.hasten(job)
    cluster.until(lambda: len(attempts("idle")) == 2, "the second attempt has ended")
    cluster.until(lambda: "held" in cluster.state(job).lower(), "it is held")
    assert ends("idle") == [("failed", "queued again"), ("failed", "held")]
    assert f"scontrol release {job}" in attempts("idle")[1].reason
    cluster.run("scancel", job)


def test_a_node_on_which_tasks_are_killed_twice_is_left_out(cluster: SlurmCluster, folder: Path) -> None:
    job = stand_in(cluster, "killed", "blamed", "--tasks-per-node=2")
    cluster.hasten(job)
    cluster.until(lambda: len(attempts("blamed")) == 2, "the second attempt has ended")
    node = attempts("blamed")[0].nodes
    cluster.until(lambda: cluster.facts(job)["ExcNodeList"] == node, "the node is left out")
    assert [each.blamed for each in attempts("blamed")] == [(node,), (node,)]
    cluster.run("scancel", job)


def test_parts_of_data_are_an_array_and_the_join_waits_for_all_of_them(cluster: SlurmCluster, folder: Path) -> None:
    lines = [json.dumps({"text": f"document {number}"}) for number in range(60)]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    # A part that fails, for a reason that is not its input's
    fails = '[ "$SLURM_ARRAY_TASK_ID" != 2 ] || [ ! -e broken ] || exit 1'
    (folder / "slurm.toml").write_text(f"[cluster]\ncpus_per_task = 1\nsetup = ['{fails}']\n")
    words = ["forge-run", "data", "prepare", "corpus.jsonl", "--tokenizer=bytes", "--held-out-every=7"]
    queued = [*words, "--out=data", "--parts=3", "--on=slurm.toml"]

    def done() -> bool:
        out = cluster.run("forge-run", "submit", "--status", "data-queue", "--json", cwd=folder)
        return json.loads(out)["state"] == "unknown"

    (folder / "broken").touch()
    assert "3 of 3 parts (1-3)" in cluster.run(*queued, cwd=folder)
    cluster.until(done, "the parts have ended, and the join is gone with them")
    parts = [f"data/parts/{number}-of-3/part.json" for number in (1, 2, 3)]
    assert [(folder / part).exists() for part in parts] == [True, False, True]
    assert not (folder / "data/manifest.json").exists()
    (folder / "broken").unlink()
    assert "1 of 3 parts (2)" in cluster.run(*queued, cwd=folder)
    cluster.until(done, "the part and the join have ended")
    cluster.run(*words, "--out=whole", cwd=folder)
    cluster.run("diff", "--recursive", "data", "whole", cwd=folder)
    assert "is finished" in cluster.run("forge-run", "submit", "--logs", "data-queue", cwd=folder)
    assert "data is finished" in cluster.run(*queued, cwd=folder)
