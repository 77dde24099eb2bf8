"""Commands whose work is divided into parts, and clusters that queue the parts.

Such a command of `forge-run` takes `--part K/N`, which does part K of N in any order and on any machine, and `--join`,
which makes the result of all parts. The same command line continues a part that was killed, and ends at once with 0 if
the part is finished.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from attrs import field, frozen

from forge_core.plugins.catalog import Catalog


@frozen(kw_only=True)
class DividedCommand:
    """A command of which a cluster does parts."""

    name: str
    """Short name, with which names of jobs begin."""
    words: tuple[str, ...]
    """Words after `forge-run`, without `--part` and `--join`."""
    count: int
    """Parts in all."""
    missing: Sequence[int]
    """Parts that are not finished, in order and counted from 1; empty: only the join is to be done."""
    folder: Path
    """Absolute path of a folder for scripts, logs and the numbers of jobs. It is not the folder of the result, whose
    files must not depend on where they were made."""
    work: Path = field(factory=Path.cwd)
    """Working directory, in which relative paths of the command start."""

    def part(self, number: str) -> str:
        """Returns the shell words of a part; its number is as the shell expands it, `$SLURM_ARRAY_TASK_ID`."""
        return f'{shlex.join(self.words)} --part "{number}/{self.count}"'

    @property
    def join(self) -> str:
        """Shell words of the command that follows all parts."""
        return f"{shlex.join(self.words)} --join"


class QueuesParts(Protocol):
    """What a component of kind `cluster` does with a divided command."""

    def rendered_parts(self, command: DividedCommand) -> str:
        """Returns what would be queued, as text. Nothing is written."""
        ...

    def submit_parts(self, command: DividedCommand) -> Iterable[str]:
        """Queue the missing parts, and the join for when all of them have succeeded; returns lines for a person.

        Raises:
            JobError: this type of cluster cannot, the command is queued already, or the system took nothing.
        """
        ...


def cluster_of(path: str, settings: Iterable[str]) -> QueuesParts:
    """Returns the cluster that a cluster file describes.

    Args:
        path: the file, with the table `[cluster]`.
        settings: keys that override it: `cluster.partition=cpu`.

    Raises:
        JobError: the file is wrong; lists every problem.
        PluginError: no installed distribution has clusters; names the one to install.
    """
    # By the name of its kind: commands that are divided do not require the distribution that submits runs
    base: Any = Catalog.installed().kind_base("cluster")
    cluster: QueuesParts = base.of_file(path, settings)
    return cluster
