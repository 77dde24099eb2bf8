"""`forge-run submit` where there is no SLURM: what it refuses, and the scripts that it writes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from forge_core.checkpoint.run_folder import owned
from forge_core.cli import main
from forge_plugin_launch.slurm import scheduler
from forge_plugin_launch.slurm.records import SlurmAttempt, append_attempt, read_attempts
from forge_testing.refusals import lacks
from forge_testing.tiny import TINY_JOB

JOB = TINY_JOB.replace("global_batch_size = 4", "global_batch_size = 16") + '[job]\nname = "NAME"\n'
CLUSTER = """
[cluster]
partition = "gpu"
account = "physics"
time = "12:00:00"
gpus_per_node = 8
cpus_per_task = 12
exclude = ["gpu07"]
max_idle_restarts = 2
requeue = ["preempted", "time"]
setup = ["module load cuda"]
srun = ["--mpi=none"]
[cluster.sbatch]
qos = "high"
exclusive = true
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`forge-run submit` in a folder with a job and a cluster file, and stand-ins for SLURM's commands in `bin`."""
    (tmp_path / "job.toml").write_text(JOB.replace("NAME", "long"))
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["submit", *words])
        return (code, *capsys.readouterr())

    return run


def program(name: str, text: str) -> None:
    path = Path("bin") / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]


def test_the_script_has_what_the_cluster_file_the_options_and_sbatch_say(submit: Run) -> None:
    code, script, _ = submit("job.toml", "--on=cluster.toml", "--nodes=2", "--print", "--", "--mem=0")
    assert code == 0
    assert not Path("runs").exists()
    here = Path.cwd()
    assert directives(script) == [
        "--job-name=long",
        f"--output={here}/runs/long/slurm/%j.log",
        f"--chdir={here}",
        "--nodes=2",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--cpus-per-task=12",
        "--partition=gpu",
        "--account=physics",
        "--time=12:00:00",
        "--exclude=gpu07",
        "--requeue",
        "--open-mode=append",
        "--qos=high",
        "--exclusive",
        "--mem=0",
    ]
    setup, *command = [line for line in script.splitlines() if line and not line.startswith("#")]
    assert setup == "module load cuda"
    assert "--max-idle-restarts=2 --requeue=preempted,time --" in command[0]
    assert command[1].split() == [
        "srun",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--cpus-per-task=12",
        "--mpi=none",
        "\\",
    ]
    assert command[2].endswith("-m forge_core run job.toml --hooks.slurm.type=forge-plugin-launch/slurm")
    subprocess.run(["/bin/bash", "-n"], input=script, text=True, check=True)


def test_an_option_is_over_the_cluster_file_and_the_users_own_hook_stays(submit: Run) -> None:
    options = ("--on=cluster.toml", "--time=1-00", "--gpus-per-node=4", "--hooks.slurm.margin_s=300", "--print")
    _, script, _ = submit("job.toml", *options)
    assert {"--time=1-00", "--ntasks-per-node=4"} <= set(directives(script))
    assert script.endswith("run job.toml --hooks.slurm.margin_s=300\n")


def test_every_mistake_is_named_before_anything_is_queued(submit: Run) -> None:
    program("sbatch", ": > queued; echo 17")
    Path("cluster.toml").write_text(CLUSTER.replace("partition", "partiton").replace('"time"]', '"tme"]'))
    code, _, err = submit("job.toml", "--on=cluster.toml", "--nodes=3", "--train.stps=3", "--time=1:0:0:0")
    assert code == 2
    assert not lacks(err, "cluster.toml:3", "cluster.partiton", "'partition'")
    assert not lacks(err, "cluster.requeue", "tme")
    assert "--time=1:0:0:0" in err.replace("'", "").replace('"', "")
    assert not lacks(err, "--train.stps=3", "train.stps", "'steps'")
    assert not Path("queued").exists()
    assert not Path("runs").exists()


def test_the_job_is_checked_with_the_ranks_of_the_allocation(submit: Run) -> None:
    code, _, err = submit("job.toml", "--nodes=3", "--print")
    assert code == 2
    assert "train.global_batch_size" in err
    assert submit("job.toml", "--nodes=4", "--print")[0] == 0


def test_a_mistake_is_named_as_it_was_written(submit: Run) -> None:
    code, _, err = submit("job.toml", "--print", "--time=x", "--cluster.nodes=0")
    assert (code, lacks(err, '--time="x": cluster.time', "--cluster.nodes=0: cluster.nodes")) == (2, []), err


REFUSED = {
    "no time beside the margin": (["--time=1"], ["cluster.time", "'1'", "60 s"]),
    "an option with a key of its own": (["--", "--nodes=2"], ["--nodes=2", "--nodes", "before"]),
    "an option of ours": (["--", "-J", "--open-mode=truncate"], ["-J"]),
    "another hook of that name": (["--hooks.slurm.type=./hook.py:Other"], ["hooks.slurm", "type"]),
    "a word that is no option": (["--", "high"], ["-- high", "--name=value"]),
    "two commands": (["--status", "--stop"], ["--status", "--stop"]),
    "to follow what is not shown": (["--follow"], ["--follow", "--logs"]),
    "JSON without a status": (["--json"], ["--json", "--status"]),
    "a limit of no array": (["--at-once=2"], ["--at-once", "--array"]),
    "no SLURM": ([], ["sbatch", "PATH"]),
}


@pytest.mark.parametrize(("words", "facts"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused(submit: Run, words: list[str], facts: list[str]) -> None:
    Path("hook.py").write_text("from forge_core import TrainingHook\nclass Other(TrainingHook): pass\n")
    code, _, err = submit("job.toml", *words)
    assert (code, lacks(err, *facts)) == (2, []), err
    assert not Path("runs").exists()


@pytest.mark.parametrize(("words", "facts"), [([], ["name a job file"]), (["--array=nowhere*"], ["nowhere*"])])
def test_nothing_to_submit_is_refused(submit: Run, words: list[str], facts: list[str]) -> None:
    code, _, err = submit(*words)
    assert (code, lacks(err, *facts)) == (2, []), err


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--", "--qos=high"], ["--status"]),
        (["--train.steps=3"], ["--train.steps=3", "runs/long is a run folder"]),
        (["--nodes=3"], ["--nodes", "runs/long is a run folder"]),
        (["--cluster.nodes=3"], ["cluster.nodes=3", "runs/long is a run folder"]),
        (["--array=jobs/*.toml"], ["--status"]),
        (["--at-once=3"], ["--status"]),
        (["--print"], ["--status", "--print"]),
    ],
)
def test_a_status_with_more_is_refused(submit: Run, words: list[str], facts: list[str]) -> None:
    code, _, err = submit("runs/long", "--status", *words)
    assert (code, lacks(err, *facts)) == (2, []), err


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("nodes = 2", ["'nodes'", "the key nodes"]),
        ('"--gpus-per-node" = 2', ["'--gpus-per-node'", "the key gpus_per_node"]),
        ('t = "1:00"', ["'t'", "the key time"]),
        ("requeue = true", ["'requeue'", "forge-run submit"]),
    ],
)
def test_an_option_of_the_cluster_file_that_has_a_key_of_its_own_is_refused(
    submit: Run, line: str, facts: list[str]
) -> None:
    Path("cluster.toml").write_text(f"{CLUSTER}{line}\n")
    code, _, err = submit("job.toml", "--on=cluster.toml", "--print")
    assert (code, lacks(err, "cluster.toml", "cluster.sbatch", *facts)) == (2, []), err


def test_a_run_that_trains_is_not_queued(submit: Run) -> None:
    with owned(Path("runs/long")):
        code, _, err = submit("job.toml", "--print")
    assert (code, lacks(err, "job.name", "runs/long", f"process {os.getpid()}")) == (2, []), err


def test_slurms_own_refusal_is_shown_and_leaves_nothing(submit: Run) -> None:
    program("sbatch", 'echo "sbatch: error: invalid partition specified: gpu" >&2; exit 1')
    code, _, err = submit("job.toml", "--on=cluster.toml")
    assert (code, lacks(err, "sbatch: error: invalid partition specified: gpu")) == (2, [])
    assert not Path("runs").exists()


def test_a_run_that_is_queued_is_not_queued_twice(submit: Run) -> None:
    program("sbatch", "echo 17")
    program("squeue", "echo 'PENDING|Priority|'")
    code, out, _ = submit("job.toml", "--nodes=2")
    assert code == 0
    assert not lacks(out, "long: job 17", "2 ranks", "2 nodes", "forge-run submit --status runs/long")
    code, _, err = submit("job.toml", "--nodes=2")
    assert code == 2
    assert not lacks(err, "job.name", "runs/long", "job 17", "PENDING (Priority)", "`scancel 17`")
    program("squeue", 'echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1')
    code, _, err = submit("job.toml", "--nodes=2")
    assert (code, lacks(err, "job 17", "runs/long", "Unable to contact slurm controller")) == (2, [])


def test_an_array_has_one_task_for_each_job(submit: Run) -> None:
    program("sbatch", "echo 17")
    Path("jobs").mkdir()
    for name in "ab":
        Path(f"jobs/{name}.toml").write_text(JOB.replace("NAME", name))
    code, out, _ = submit("--array=jobs/*.toml", "--at-once=1", "--train.steps=5")
    assert code == 0
    assert "a: job 17_0, 1 rank on 1 node" in out
    script = Path("runs/a-array.sh").read_text()
    assert "--array=0-1%1" in directives(script)
    subprocess.run(["/bin/bash", "-n", "runs/a-array.sh"], check=True)
    Path("exec").write_text(script.replace("exec bash", "echo"))
    done = subprocess.run(
        ["/bin/bash", "exec"], env={"SLURM_ARRAY_TASK_ID": "1"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(Path("runs/b/submit.sh").absolute())
    assert "run jobs/b.toml --train.steps=5" in Path("runs/b/submit.sh").read_text()
    assert json.loads(Path("runs/b/slurm/submission.json").read_text())["job"] == "17_1"


@pytest.mark.parametrize("name", ["runs/a-array.sh", "runs/a/submit.sh"])
def test_a_script_by_hand_survives(submit: Run, name: str) -> None:
    Path("jobs").mkdir()
    for run in ("a", "b"):
        Path(f"jobs/{run}.toml").write_text(JOB.replace("NAME", run))
    program("sbatch", "echo 7")
    Path(name).parent.mkdir(parents=True)
    Path(name).write_text("#!/bin/bash\n# by hand\n")
    code, _, err = submit("--array=jobs/*.toml")
    assert code == 2
    assert name in err
    assert Path(name).read_text() == "#!/bin/bash\n# by hand\n"


def test_runs_of_an_array_that_would_share_a_folder_are_refused(submit: Run) -> None:
    Path("other.toml").write_text(JOB.replace("NAME", "long"))
    code, _, err = submit("--array", "job.toml", "other.toml", "--print")
    assert code == 2
    assert not lacks(err, "other.toml: job.name", "'long'", "job.toml")


def test_nodes_that_failed_twice_are_left_out_of_the_next_submission(submit: Run) -> None:
    Path("runs/long").mkdir(parents=True)
    append_attempt(Path("runs/long"), SlurmAttempt(job="3", began=0.0, excluded=("gpu03",)))
    _, script, _ = submit("job.toml", "--on=cluster.toml", "--print")
    assert "--exclude=gpu07,gpu03" in directives(script)


def test_the_status_needs_no_queue(submit: Run) -> None:
    run = Path("runs/long")
    (run / "slurm").mkdir(parents=True)
    (run / "slurm/submission.json").write_text('{"job": "17"}')
    (run / "metrics.jsonl").write_text('{"step": 442, "loss": 1.25}\n{"step": 44')
    ended = {"step_began": 400, "step_ended": 442, "saved": 440, "code": 137, "action": "queued again"}
    append_attempt(
        run, SlurmAttempt(job="17", nodes="gpu[01-02]", began=0.0, ended=60.0, kind="failed", reason="x", **ended)
    )
    (run / "slurm/current.json").write_text('{"job": "17", "restart": 1, "began": 100.0}')
    code, out, _ = submit("--status", "runs/long")
    assert code == 0
    words = [" ".join(line.split()) for line in out.splitlines()]
    assert any(not lacks(line, "job 17", "squeue") for line in words)
    assert "step 442, loss 1.2500" in words
    assert any(not lacks(line, "last end", "x", "queued again") for line in words)
    assert any(
        line.startswith("1 17.0 gpu[01-02]") and "60 s 400 to 442 137 failed, queued again" in line for line in words
    )
    assert words[-1].startswith("2 17.1")
    assert words[-1].endswith("under way")
    code, out, _ = submit("--status", "runs/long", "--json")
    facts = json.loads(out)
    assert (code, facts["run"], facts["job"], facts["step"], facts["loss"]) == (0, "runs/long", "17", 442, 1.25)
    assert "squeue" in facts["queue"]
    first, last = facts["attempts"]
    assert ended.items() <= first.items()
    assert (first["began"], first["ended"], last["restart"], last["ended"]) == (0.0, 60.0, 1, None)
    program("squeue", "exit 0")
    [line] = [line for line in submit("--status", "runs/long")[1].splitlines() if line.startswith("job ")]
    assert not lacks(line, 17, "queue")
    code, _, err = submit("--status", "runs/other")
    assert (code, lacks(err, "runs/other")) == (2, [])
    Path("runs/by-hand").mkdir()
    code, _, err = submit("--status", "runs/by-hand")
    assert (code, lacks(err, "runs/by-hand", "slurm/submission.json")) == (2, [])


def test_a_controller_that_does_not_answer_is_given_up(submit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "ANSWER_S", 0.05)
    program("squeue", "exec /bin/sleep 60")
    with pytest.raises(scheduler.SlurmError, match="squeue did not answer"):
        scheduler.queue_state("17")


def test_half_a_line_of_the_attempts_is_no_attempt(tmp_path: Path) -> None:
    append_attempt(tmp_path, SlurmAttempt(job="1", began=0.0))
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"job": "1", "rest')
    append_attempt(tmp_path, SlurmAttempt(job="1", restart=2, began=0.0))
    assert [each.restart for each in read_attempts(tmp_path)] == [0, 2]


def submitted(folder: str, job: str = "17") -> Path:
    """A run that was queued as this job, whose log is there."""
    run = Path(folder)
    (run / "slurm").mkdir(parents=True)
    log = run / "slurm" / f"{job}.log"
    log.write_text("step 1\nstep 2\n")
    (run / "slurm" / "submission.json").write_text(json.dumps({"job": job, "log": str(log)}))
    return run


def test_the_log_of_a_run_is_printed(submit: Run) -> None:
    run = submitted("runs/long")
    assert submit("--logs", str(run))[:2] == (0, "step 1\nstep 2\n")
    (run / "slurm" / "17.log").unlink()
    code, _, err = submit("job.toml", "--logs")
    assert (code, lacks(err, "17.log", "has not begun")) == (2, [])


@pytest.mark.parametrize(("under_way", "asked"), [(True, "--signal=USR1 17\n"), (False, "17\n")])
def test_a_run_is_stopped_with_a_save_where_there_is_something_to_save(submit: Run, under_way, asked) -> None:
    program("scancel", 'echo "$@" > asked')
    run = submitted("runs/long")
    if under_way:
        (run / "slurm" / "current.json").write_text('{"job": "17", "began": 1.0}')
    code, out, _ = submit("--stop", "runs/long")
    assert (code, Path("asked").read_text()) == (0, asked)
    assert "saves" in out if under_way else "cancelled" in out
    program("scancel", "echo controller is away >&2; exit 1")
    code, _, err = submit("--stop", "runs/long")
    assert (code, lacks(err, "job 17", "controller is away")) == (2, [])


OTHER = """
from attrs import frozen
from forge_plugin_launch import Cluster, Status


@frozen(kw_only=True)
class Hosts(Cluster):
    '''Starts a run on hosts of a list, by ssh.'''

    hosts: tuple[str, ...] = ()

    def run_problems(self, job):
        from forge_core import Problem

        if len(self.hosts) != self.nodes:
            yield Problem("cluster.hosts", f"has {len(self.hosts)} hosts for {self.nodes} nodes")

    def rendered(self, run):
        commands = [self.node_command(run, str(n), self.hosts[0]) for n in range(self.nodes)]
        return "".join(f"{host}: {command}\\n" for host, command in zip(self.hosts, commands))

    def submit(self, run):
        return [f"{run.name}: started on {', '.join(self.hosts)}"]

    def status(self, run):
        return Status(state="running", words="up", id="7", facts={"hosts": list(self.hosts)})
"""


def test_another_type_of_cluster_is_one_file(submit: Run) -> None:
    Path("hosts.py").write_text(OTHER)
    Path("hosts.toml").write_text('[cluster]\ntype = "./hosts.py:Hosts"\nnodes = 2\nhosts = ["a", "b"]\n')
    on = ("job.toml", "--on", "hosts.toml", "--cluster.gpus_per_node=2")
    code, out, _ = submit(*on, "--train.steps=9", "--print")
    assert (code, out.splitlines()[1]) == (
        0,
        'b: forge-run launch local job.toml --train.steps=9 --nproc=2 --nodes=2 --node="1" --address="a"',
    )
    assert submit(*on)[1] == "long: started on a, b\n"
    assert json.loads(submit(*on, "--status", "--json")[1]) == {
        "run": "long",
        "job": "7",
        "state": "running",
        "words": "up",
        "hosts": ["a", "b"],
    }
    # The job is checked with the ranks of the file: 16 samples are no multiple of 6
    for nodes, words in (("3", ["train.global_batch_size"]), ("4", ["cluster.hosts", "2 hosts for 4 nodes"])):
        code, _, err = submit(*on, f"--cluster.nodes={nodes}")
        assert (code, lacks(err, *words)) == (2, []), err
    code, _, err = submit(*on, "--", "--qos=high")
    assert (code, lacks(err, "-- --qos=high", "no further options")) == (2, [])
    code, _, err = submit("--array", "job.toml", "--on", "hosts.toml")
    assert (code, lacks(err, "has no arrays")) == (2, [])


@pytest.mark.parametrize("file", ["runs/long/metrics.jsonl", "weights.bin"])
def test_a_file_that_is_no_job_names_no_run(submit: Run, file: str) -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("")
    code, _, err = submit("--status", file)
    assert (code, lacks(err, file, "is a file, and no run folder")) == (2, [])
