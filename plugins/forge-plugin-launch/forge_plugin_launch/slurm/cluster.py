"""Settings of a cluster for submitting runs: `[submit]` of a separate file, and options of the command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
from attrs import field, frozen
from attrs.validators import deep_iterable, ge, gt, in_

from forge_core.config.structure import INVALID, structure
from forge_core.config.tree import read_job
from forge_core.contracts.errors import JobError, Problem
from forge_core.plugins.catalog import Catalog
from forge_plugin_launch.slurm.decision import REQUEUED
from forge_plugin_launch.slurm.scheduler import parse_duration

OURS = (
    *("array", "chdir", "gpus-per-node", "job-name", "nodes", "ntasks", "ntasks-per-node", "no-requeue", "open-mode"),
    *("output", "requeue", "cpus-per-task", "partition", "account", "time", "exclude"),
)
"""Options of sbatch that have their own keys, or that the script depends on."""
_LONG = "array chdir job-name nodes ntasks output cpus-per-task partition account time exclude"
SHORT = dict(zip("aDJNnocpAtx", _LONG.split(), strict=True))
KEYS = {"partition", "account", "time", "nodes", "gpus-per-node", "cpus-per-task", "exclude"}
LEAST_MARGIN_S = 60.0


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
class Cluster:
    """`[submit]`: what to ask SLURM for, and when to queue a run again."""

    partition: str = ""
    """Partition of SLURM; empty: the cluster's default."""
    account: str = ""
    """Account to charge; empty: the user's default."""
    time: str = field(default="", validator=_time)
    """Time limit of one attempt, as sbatch takes it: `12:00:00`, `2-00`. Empty: the partition's."""
    nodes: int = field(default=1, validator=gt(0))
    gpus_per_node: int = field(default=0, validator=ge(0))
    """GPUs of a node, each of which gets a rank. 0: none are asked for."""
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
        return self.tasks_per_node or self.gpus_per_node or 1

    @property
    def world_size(self) -> int:
        """Ranks of a run."""
        return self.nodes * self.ranks_per_node

    def time_problem(self, margin_s: float) -> str:
        """Why no step would be made before the hook `slurm` stops; empty if some will."""
        limit, margin = parse_duration(self.time) if self.time else None, margin_s or LEAST_MARGIN_S
        if limit is None or limit > margin:
            return ""
        return f"{self.time!r} is {limit:.0f} s, and the run stops {margin:.0f} s before its end (hooks.slurm.margin_s)"


@frozen(kw_only=True)
class ClusterFile:
    """A cluster file."""

    submit: Cluster = field(factory=Cluster)


def read_cluster(preset: str | None, options: Iterable[str]) -> tuple[Cluster, Sequence[Problem]]:
    """Reads a cluster file, and lays options of the command line (`nodes=8`) over it.

    Returns:
        The settings, in which defaults stand for keys that are wrong, and every problem.
    """
    try:
        root, problems = read_job([preset] if preset else [], [f"submit.{option}" for option in options])
    except JobError as error:
        return Cluster(), error.problems
    file, findings = structure(root, ClusterFile, Catalog([]))
    problems = [*problems, *findings.problems]
    return Cluster() if file is INVALID else file.submit, [_as_option(problem) for problem in problems]


def _as_option(problem: Problem) -> Problem:
    """The flag as it was written: `--nodes=0`, and not the key that it sets."""
    return attrs.evolve(problem, origin=problem.origin.replace("--submit.", "--"))
