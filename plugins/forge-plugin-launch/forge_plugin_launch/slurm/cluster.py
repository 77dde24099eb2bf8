"""Type `slurm` of kind `cluster`: what to ask SLURM for, and when to queue a run again."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs
from attrs import field, frozen
from attrs.validators import deep_iterable, ge, in_

from forge_core.contracts.errors import ExitCode, JobError, Problem
from forge_core.job import Job
from forge_kit.tools.divided_commands import DividedCommand
from forge_plugin_launch.clusters import Cluster, Status, SubmittedRun
from forge_plugin_launch.slurm import scheduler
from forge_plugin_launch.slurm.decision import REQUEUED
from forge_plugin_launch.slurm.records import CURRENT, FOLDER, SUBMISSION, read_json
from forge_plugin_launch.slurm.scheduler import SlurmError, parse_duration

OURS = (
    *("array", "chdir", "gpus-per-node", "job-name", "nodes", "ntasks", "ntasks-per-node", "no-requeue", "open-mode"),
    *("output", "requeue", "cpus-per-task", "partition", "account", "time", "exclude"),
)
"""Options of sbatch that have their own keys, or that the script depends on."""
_LONG = "array chdir job-name nodes ntasks output cpus-per-task partition account time exclude"
SHORT = dict(zip("aDJNnocpAtx", _LONG.split(), strict=True))
KEYS = {"partition", "account", "time", "nodes", "gpus-per-node", "cpus-per-task", "exclude"}
FLAGS = KEYS - {"exclude"}
"""Keys that are options of the command, too."""
LEAST_MARGIN_S = 60.0
HOOK = "--hooks.slurm.type=forge-plugin-launch/slurm"


def _time(_: object, __: attrs.Attribute, value: str) -> None:
    if value and value != "UNLIMITED" and parse_duration(value) is None:
        raise ValueError(f"'time' must be as sbatch takes it (`12:00:00`, `2-00`, `90` minutes), got {value!r}")


def _sbatch(_: object, __: attrs.Attribute, value: Mapping[str, object]) -> None:
    for name in value:
        plain = name.lstrip("-")
        # Short names too: `p` would set the partition a second time
        plain = SHORT.get(plain, plain) if len(plain) == 1 else plain
        if plain in OURS:
            where = f"the key {plain.replace('-', '_')}" if plain in KEYS else "forge-run submit, which sets it itself"
            raise ValueError(f"'sbatch' has the option {name!r}, which belongs to {where}")


@frozen(kw_only=True)
class SlurmCluster(Cluster):
    """SLURM: runs stop before the time limit, and are queued again until they have finished."""

    partition: str = ""
    """Partition of SLURM; empty: the cluster's default."""
    account: str = ""
    """Account to charge; empty: the user's default."""
    time: str = field(default="", validator=_time)
    """Time limit of one attempt, as sbatch takes it: `12:00:00`, `2-00`. Empty: the partition's."""
    tasks_per_node: int = field(default=0, validator=ge(0))
    """Ranks of a node; 0: one a GPU, or one where there are no GPUs."""
    cpus_per_task: int = field(default=0, validator=ge(0))
    """Cores of a rank; 0: as the cluster has it."""
    exclude: tuple[str, ...] = ()
    """Nodes to leave out, also in SLURM's short form (`gpu[07-09]`)."""
    max_idle_restarts: int = field(default=3, validator=ge(0))
    """Restarts in a row without a new checkpoint, after which the job is held instead of queued again."""
    requeue: tuple[str, ...] = field(default=REQUEUED, validator=deep_iterable(in_(REQUEUED)))
    """Ends after which the job is queued again: `preempted`, `time` (limit), `failed` (a rank, or a hang), `node`."""
    setup: tuple[str, ...] = ()
    """Lines of shell before the run, on the first node: `module load …`."""
    srun: tuple[str, ...] = ()
    """Further options of srun: `--container-image=…`."""
    sbatch: Mapping[str, str | int | bool] = field(factory=dict, validator=_sbatch)
    """Further options of sbatch by name: `qos = "high"`; true for one without a value."""

    @property
    def ranks_per_node(self) -> int:
        """Tasks that srun starts on each node."""
        return self.tasks_per_node or super().ranks_per_node

    def time_problem(self, margin_s: float) -> str:
        """Why no step would be made before the hook `slurm` stops; empty if some will."""
        limit, margin = parse_duration(self.time) if self.time else None, margin_s or LEAST_MARGIN_S
        if limit is None or limit > margin:
            return ""
        return f"{self.time!r} is {limit:.0f} s, and the run stops {margin:.0f} s before its end (hooks.slurm.margin_s)"

    def with_options(self, options: Sequence[str]) -> SlurmCluster:
        """Returns this cluster with options of sbatch, which override the file's."""
        return attrs.evolve(self, sbatch={**self.sbatch, **_options(options)})

    def own_overrides(self, job: Job) -> Iterable[str]:
        """The hook `slurm`, unless the job has it."""
        from forge_plugin_launch.slurm.hook import Slurm

        has_hook = any(isinstance(hook, Slurm) for hook in job.hooks.values()) or "slurm" in job.hooks
        return () if has_hook else (HOOK,)

    def run_problems(self, job: Job) -> Iterable[Problem]:
        """Whether the run is queued already, or in use, or too short for its margin."""
        from forge_plugin_launch.slurm.queueing import run_problems

        return run_problems(job, self)

    def rendered(self, run: SubmittedRun) -> str:
        """The batch script."""
        from forge_plugin_launch.slurm.queueing import script_of

        return script_of(self, run).text()

    def submit(self, run: SubmittedRun) -> Iterable[str]:
        """Write the script into the run folder, and queue it."""
        from forge_plugin_launch.slurm.queueing import queue, script_of

        return queue(script_of(self, run))

    def rendered_array(self, runs: Sequence[SubmittedRun], at_once: int) -> str:
        """The scripts of the array and of its runs."""
        from forge_plugin_launch.slurm.queueing import printed_array, script_of

        return printed_array([script_of(self, run) for run in runs], at_once)

    def submit_array(self, runs: Sequence[SubmittedRun], at_once: int) -> Iterable[str]:
        """Queue runs as the tasks of one array."""
        from forge_plugin_launch.slurm.queueing import queue_array, script_of

        return queue_array([script_of(self, run) for run in runs], at_once)

    def rendered_parts(self, command: DividedCommand) -> str:
        """The scripts of the array and of the join."""
        from forge_plugin_launch.slurm.parts import rendered

        return rendered(self, command)

    def submit_parts(self, command: DividedCommand) -> Iterable[str]:
        """Queue the parts as an array, each on one node and without GPUs, and the join as a job that depends on it."""
        from forge_plugin_launch.slurm.parts import queue

        return queue(self, command)

    def status(self, run: SubmittedRun) -> Status:
        """Of the queue, else of the last attempt; of the parts of a command, of the queue alone."""
        from forge_plugin_launch.slurm.parts import jobs_of, status_of
        from forge_plugin_launch.slurm.status import state_of

        jobs = jobs_of(run.folder)
        return status_of(jobs) if jobs else state_of(run.folder)

    def show(self, run: SubmittedRun, is_json: bool) -> None:
        """Print the queue, the attempts and the step; of the parts of a command, the queue."""
        from forge_plugin_launch.slurm.parts import jobs_of
        from forge_plugin_launch.slurm.status import print_status

        if jobs_of(run.folder):
            super().show(run, is_json)
        else:
            print_status(run.folder, is_json=is_json)

    def logs(self, run: SubmittedRun, follow: bool) -> int:
        """Print the log that all attempts of the last job write to, or the logs of all parts of a command."""
        from forge_plugin_launch.slurm.parts import jobs_of, print_logs

        if jobs_of(run.folder):
            return print_logs(run.folder, follow)
        log = self._submission(run.folder).get("log", "")
        # SLURM creates it when the job starts
        if not Path(log).is_file():
            raise JobError(f"{log} is not there yet: the job has not begun")
        if follow:
            return subprocess.run(["tail", "-n", "+1", "-f", log], check=False).returncode
        print(Path(log).read_text(encoding="utf-8", errors="backslashreplace"), end="")
        return ExitCode.FINISHED

    def stop(self, run: SubmittedRun) -> Iterable[str]:
        """Have the run save and end, which is not queued again; a job that waits, or does parts, is cancelled."""
        from forge_plugin_launch.slurm import parts

        if parts.jobs_of(run.folder):
            return parts.stop(run.folder)
        job = self._submission(run.folder)["job"]
        is_under_way = bool(read_json(run.folder / FOLDER / CURRENT))
        try:
            # Of a job that waits there is nothing to save, and SLURM signals none
            scheduler.ask("scancel", *(["--signal=USR1"] if is_under_way else []), job)
        except SlurmError as error:
            raise JobError(f"job {job} was not stopped: {error}") from error
        saves = "saves and ends" if is_under_way else "was waiting, and is cancelled"
        return [f"{run.name}: job {job} {saves}; forge-run submit with the same job continues it"]

    def _submission(self, folder: Path) -> Mapping[str, str]:
        submission = read_json(folder / FOLDER / SUBMISSION)
        if not submission:
            raise JobError(f"{folder} was not submitted by `forge-run submit`: it has no {FOLDER}/{SUBMISSION}")
        return submission


def _options(options: Sequence[str]) -> dict[str, str | bool]:
    """Options of sbatch by name; a `JobError` names one that has an option here."""
    found: dict[str, str | bool] = {}
    for option in options:
        if not option.startswith("-"):
            raise JobError(f"-- {option}: options of sbatch are written --name=value")
        name, equals, value = option.lstrip("-").partition("=")
        if not option.startswith("--"):
            # The value of a short option may follow without a space: -N4
            name, value, equals = option[1:2], option[2:].removeprefix("="), option[2:]
        plain = name if option.startswith("--") else SHORT.get(name, name)
        if plain in OURS:
            here = f"write --{plain} before the --" if plain in FLAGS else "forge-run submit sets it itself"
            raise JobError(f"-- {option}: {here}")
        found[name] = value if equals else True
    return found
