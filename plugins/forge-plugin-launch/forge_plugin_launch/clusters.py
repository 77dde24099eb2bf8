"""The kind `cluster`: a system to which runs are submitted, and the file that describes it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import attrs
from attrs import field, frozen
from attrs.validators import deep_iterable, ge, gt

from forge_core.config.structure import INVALID, structure
from forge_core.config.tree import read_job
from forge_core.contracts.components import Component, default_type
from forge_core.contracts.errors import ExitCode, JobError, Problem
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.divided_commands import DividedCommand

State = Literal["queued", "starting", "running", "recovering", "finished", "failed", "stopped", "unknown"]
"""What has become of a submitted run. `recovering`: between two attempts; `stopped`: by request, and not continued."""
CONTINUED = (ExitCode.STOPPED,)
"""Exit codes after which the same command continues a run, wherever it is started: everything is saved."""
FINAL = (ExitCode.FINISHED, ExitCode.BAD_JOB, ExitCode.NON_FINITE)
"""Exit codes after which another start changes nothing: a cluster does not start the run again. After others, such as
1, it may, as long as attempts make progress."""
PORT = 29400
"""Port at which rank 0 listens on the first node, where the cluster gives none; torchrun's default, too."""


@frozen(kw_only=True)
class SubmittedRun:
    """A run that is to be submitted, or was."""

    name: str
    """`job.name`. A cluster that allows fewer characters in names makes its own of it."""
    folder: Path
    """Run folder, where the job has it: on the cluster, or on a file system that both see."""
    work: Path = field(factory=Path.cwd)
    """Working directory of the command, in which relative paths of job files and local component files start."""
    words: tuple[str, ...] = ()
    """Job files, overrides, and options of `forge-run run`, as each rank takes them."""
    component_files: tuple[Path, ...] = ()
    """Local files of components that the submission names (`./router.py:Router`), as the run itself records them."""
    job: Job | None = None
    """The checked job; None of a run that is named by its folder alone."""

    @property
    def grace_s(self) -> float:
        """Seconds that ranks may need to save between SIGTERM and SIGKILL: `launch.grace_s` of the job; 0: no limit."""
        assert self.job is not None, "of a run that is submitted"
        return self.job.launch.grace_s


@frozen(kw_only=True)
class Status:
    """State of a run on a cluster."""

    state: State
    words: str
    """The same in its own words."""
    id: str = ""
    """Its name or number on the cluster; empty where it has none."""
    facts: Mapping[str, Any] = field(factory=dict)
    """Further facts for programs, of JSON's types, by names that the type documents."""


def _absolute(_: object, __: attrs.Attribute, value: str) -> None:
    if not value.startswith("/"):
        raise ValueError(f"'node_paths' has {value!r}; write the whole path, from / on")


@frozen(kw_only=True)
class Cluster(Component[None]):
    """`[cluster]` of a cluster file: where runs are submitted, and on how many ranks.

    A type renders what its system takes by the system's own classes or schema, and holds no secret: files and logs have
    names of variables and of secrets of the system, never their values.

    What a run needs of a system, whichever it is:

    - The line of `node_command` in a shell on each of `nodes` nodes at once, in `SubmittedRun.work` or a copy of it. It
      starts `ranks_per_node` ranks. Variables that the system sets tell it which of the nodes it is on, and where the
      first one is reached. A system that starts each rank itself, as SLURM does, runs `forge-run run` with
      `SubmittedRun.words`; a component of kind `environment` reads its variables.
    - SIGTERM to that command is the request to stop: the run saves and exits with 75. `SubmittedRun.grace_s` is the
      time that it may take.
    - Its exit code: 0 finished; 75 saved, and the same command continues; 2 a wrong job and 76 losses that are not
      finite, after which another start changes nothing; others failed (see `CONTINUED` and `FINAL`).
    - Run folders on storage that outlives the nodes, at one path on all of them: a later start with the same command
      continues from the newest checkpoint there. Where storage mounted at a path is how a type has it, it refuses a job
      whose `job.output` is elsewhere.
    """

    kind = "cluster"
    usual_type = "slurm"

    nodes: int = field(default=1, validator=gt(0))
    """Nodes of a run."""
    gpus_per_node: int = field(default=0, validator=ge(0))
    """GPUs of a node, each of which gets a rank. 0: none are asked for."""
    node_paths: tuple[str, ...] = field(default=(), validator=deep_iterable(_absolute))
    """Folders that nodes have and this machine may lack: local disks, folders of an image. Files below them that a job
    reads and that are not here are checked on the nodes."""

    @property
    def storage_paths(self) -> Sequence[str]:
        """Paths at which this type mounts storage on nodes, or places copies; none by default."""
        return ()

    @classmethod
    def of_file(cls, path: str, settings: Iterable[str]) -> Cluster:
        """Returns the cluster of a cluster file, which settings (`cluster.nodes=8`) override; see `read_cluster`.

        Raises:
            JobError: with every problem.
        """
        cluster, problems = read_cluster(path, settings)
        if problems:
            raise JobError([*problems])
        return cluster

    @property
    def ranks_per_node(self) -> int:
        """Ranks that are started on each node."""
        return self.gpus_per_node or 1

    @property
    def world_size(self) -> int:
        """Ranks of a run."""
        return self.nodes * self.ranks_per_node

    def with_options(self, options: Sequence[str]) -> Self:
        """Returns this cluster with options of its program, from behind `--` on the command line.

        Raises:
            JobError: one is not allowed; by default all are refused.
        """
        # Passed on unread, they would be the only part of a submission that nobody checks
        if options:
            raise JobError(f"-- {' '.join(options)}: this type of cluster takes no further options; write them as keys")
        return self

    def own_overrides(self, job: Job) -> Iterable[str]:
        """Overrides that a run on this cluster needs in addition: `--hooks.x.type=…`."""
        return ()

    def run_problems(self, job: Job) -> Iterable[Problem]:
        """Why a job cannot run on this cluster, or cannot be submitted now. The job itself is right."""
        return ()

    def node_command(self, run: SubmittedRun, node: str, address: str) -> str:
        """Returns the shell command of each node, the same on all of them.

        Args:
            run: to be started.
            node: number of the node, from 0, as the shell expands it: `$SKYPILOT_NODE_RANK`.
            address: host of node 0, as the shell expands it; command substitutions are allowed.
        """
        words = ["forge-run", "launch", "local", *run.words, f"--nproc={self.ranks_per_node}"]
        # One node needs no address, which some systems set for several only
        if self.nodes == 1:
            return shlex.join(words)
        return f'{shlex.join([*words, f"--nodes={self.nodes}"])} --node="{node}" --address="{address}"'

    def rendered(self, run: SubmittedRun) -> str:
        """Returns the text that is submitted, for `--print`. Nothing is written, and nobody is asked."""
        raise NotImplementedError

    def submit(self, run: SubmittedRun) -> Iterable[str]:
        """Submit a run; returns lines for a person: its name there, how to look at it, how to end it.

        Raises:
            JobError: the system took nothing, with its own words.
        """
        raise NotImplementedError

    def rendered_array(self, runs: Sequence[SubmittedRun], at_once: int) -> str:
        """Returns the text of an array of runs, as `rendered` does; refused by default."""
        raise JobError("this type of cluster has no arrays; submit the jobs one by one")

    def submit_array(self, runs: Sequence[SubmittedRun], at_once: int) -> Iterable[str]:
        """Submit runs of which `at_once` are under way at a time (0: all); refused by default."""
        raise JobError("this type of cluster has no arrays; submit the jobs one by one")

    def rendered_parts(self, command: DividedCommand) -> str:
        """Returns the text of the parts of a command and of its join, as `rendered` does; refused by default."""
        raise self._no_parts(command)

    def submit_parts(self, command: DividedCommand) -> Iterable[str]:
        """Submit the missing parts of a command, and its join for when all have succeeded; refused by default.

        `status`, `logs` and `stop` take the command's folder as that of a run. Returns lines for a person.
        """
        raise self._no_parts(command)

    def _no_parts(self, command: DividedCommand) -> JobError:
        name = Catalog.installed().type_of(type(self))
        hand = f"run it with --part 1/{command.count} to {command.count}/{command.count} on any machines, then --join"
        return JobError(f"clusters of type {name!r} do not queue the parts of a command; {hand}")

    def status(self, run: SubmittedRun) -> Status:
        """Returns what has become of a run.

        Raises:
            JobError: it was not submitted, or the system does not answer.
        """
        raise NotImplementedError

    def show(self, run: SubmittedRun, is_json: bool) -> None:
        """Print the status of a run: by default what `status` returns."""
        from forge_kit.tools.json_output import print_json
        from forge_kit.tools.tables import columns

        status = self.status(run)
        if is_json:
            about = {"run": run.name, "job": status.id, "state": status.state, "words": status.words}
            print_json({**about, **status.facts})
        else:
            facts = [(key, str(value)) for key, value in status.facts.items()]
            state = f"{status.state}: {status.words}"
            print(columns([("run", run.name), ("job", status.id), ("state", state), *facts]))

    def logs(self, run: SubmittedRun, follow: bool) -> int:
        """Print the output of a run, and with `follow` what it prints from now on; returns an exit code."""
        raise NotImplementedError

    def stop(self, run: SubmittedRun) -> Iterable[str]:
        """Request a run to save and stop, and keep it from being continued; returns lines for a person."""
        raise NotImplementedError


@frozen(kw_only=True)
class ClusterFile:
    """A cluster file."""

    cluster: Cluster = default_type("slurm")


def read_cluster(path: str | None, options: Iterable[str]) -> tuple[Cluster, Sequence[Problem]]:
    """Reads a cluster file, and lays options of the command line (`cluster.nodes=8`) over it.

    Returns:
        The cluster, in which defaults stand for keys that are wrong, and every problem.

    Raises:
        JobError: the file cannot be read, or its type is not known, so that no cluster is left.
    """
    root, problems = read_job([path] if path else [], options)
    file, findings = structure(root, ClusterFile, Catalog.installed())
    problems = [*problems, *findings.problems]
    # Without a type there is no number of ranks to check a job with
    if file is INVALID:
        raise JobError(problems)
    return file.cluster, problems
