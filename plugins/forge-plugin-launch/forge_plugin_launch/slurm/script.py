"""The batch script of a run: the resources it requests from SLURM, and the one command that it becomes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from attrs import frozen

from forge_kit.tools.outputs import MARK
from forge_plugin_launch.slurm.cluster import SlurmCluster
from forge_plugin_launch.slurm.records import FOLDER, SCRIPT


@frozen(kw_only=True)
class RunScript:
    """The script of one run."""

    name: str
    run: Path
    """Its folder, absolute."""
    work: Path
    """Working directory, in which relative paths of the job start."""
    words: tuple[str, ...]
    """Job files and overrides."""
    cluster: SlurmCluster
    excluded: tuple[str, ...] = ()
    """Nodes that failed twice in earlier attempts."""

    def text(self) -> str:
        """Returns the text of `submit.sh`."""
        lines = ["#!/bin/bash", f"# {MARK}: of `forge-run submit`; `sbatch` takes it again as it is.", *self._header()]
        return "\n".join([*lines, "", *self.cluster.setup, self._command(), ""])

    def _header(self) -> Iterator[str]:
        own = {"job-name": self.name, "output": self.run / FOLDER / "%j.log"}
        yield from directives(own)
        yield from shared_directives(self.cluster, self.excluded, self.work)

    def _command(self) -> str:
        # `exec`: one process less between SLURM and the program that has to know what SLURM does
        policy = [
            f"--max-idle-restarts={self.cluster.max_idle_restarts}",
            f"--requeue={','.join(self.cluster.requeue)}",
        ]
        # -P: a file of the working directory must not replace a module that this program imports
        attempt = [sys.executable, "-P", "-m", "forge_plugin_launch.slurm.attempt", str(self.run), *policy, "--"]
        # Not --kill-on-bad-exit: ranks that saved exit with 75 one after the other, and the first would have the others
        # killed before their last output. Nor --wait, which would kill the remaining tasks some time after the first
        # end, even a good one. Forge ends ranks whose peers have failed; `attempt` ends the step of ranks that cannot
        # receive this.
        srun = srun_words(self.cluster, "--kill-on-bad-exit=0", "--wait=0")
        train = [sys.executable, "-m", "forge_core", "run", *self.words]
        parts = [attempt, srun, train]
        return "exec " + " \\\n  ".join(shlex.join(part) for part in parts)


def srun_words(cluster: SlurmCluster, *options: str) -> list[str]:
    """Returns the words of srun in a batch script: options of ours, and then the file's."""
    # srun no longer takes the number of cores from sbatch, from SLURM 22.05 on
    cores = [f"--cpus-per-task={cluster.cpus_per_task}"] if cluster.cpus_per_task else []
    return ["srun", *options, *cores, *cluster.srun]


def shared_directives(cluster: SlurmCluster, excluded: Sequence[str], work: Path) -> Iterator[str]:
    """Yields the `#SBATCH` lines that runs of one submission have in common."""
    yield from directives({"chdir": work, "nodes": cluster.nodes, "ntasks-per-node": cluster.ranks_per_node})
    asked = {
        "gpus-per-node": cluster.gpus_per_node,
        "cpus-per-task": cluster.cpus_per_task,
        "partition": cluster.partition,
        "account": cluster.account,
        "time": cluster.time,
        "exclude": ",".join([*cluster.exclude, *excluded]),
    }
    yield from directives({name: value for name, value in asked.items() if value})
    # Without --requeue SLURM refuses to queue the job again, also when it is asked to; one log for all attempts
    yield from ("#SBATCH --requeue", "#SBATCH --open-mode=append")
    yield from directives(dict(cluster.sbatch))


def directives(options: Mapping[str, object]) -> Iterator[str]:
    """Yields an `#SBATCH` line for each option of sbatch by name; true for one without a value."""
    for name, value in options.items():
        option = f"{'-' if len(name) == 1 else '--'}{name.lstrip('-')}"
        if value is True:
            yield f"#SBATCH {option}"
        elif value is not False:
            yield f"#SBATCH {shlex.quote(f'{option} {value}' if len(name) == 1 else f'{option}={value}')}"


def array_text(scripts: Sequence[RunScript], at_once: int, output: Path, after: Sequence[str] = ()) -> str:
    """Returns the script of an array, of which each task becomes the script of one run; it waits for jobs `after`."""
    first = scripts[0]
    limit = f"%{at_once}" if at_once else ""
    own = {"job-name": f"{first.name}-array", "output": output, "array": f"0-{len(scripts) - 1}{limit}"}
    excluded = list(dict.fromkeys(node for script in scripts for node in script.excluded))
    paths = " \\\n  ".join(shlex.quote(str(script.run / SCRIPT)) for script in scripts)
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {MARK}: of `forge-run submit --array`; task N is run N of these.",
            *directives(dict(own)),
            # Not in the scripts of the runs, which are queued again when those jobs are long forgotten
            *directives({"dependency": f"afterany:{':'.join(after)}"} if after else {}),
            *shared_directives(first.cluster, excluded, first.work),
            "",
            f"scripts=({paths})",
            # `exec` here too: signals to the batch script must reach the program, and no shell around it
            'exec bash "${scripts[$SLURM_ARRAY_TASK_ID]}"',
            "",
        ]
    )
