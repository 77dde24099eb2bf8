"""The phases of a command as arrays of SLURM, by datatrove's executor, each waiting for the one before it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from datatrove.executor.slurm import SlurmPipelineExecutor

from forge_core.contracts.errors import ForgeError
from forge_core.files import write_atomically
from forge_plugin_datatrove.execution import BEGUN, WORK, Work, incomplete_tasks, owned
from forge_plugin_datatrove.options import placed, read_options
from forge_plugin_datatrove.steps import demand
from forge_plugin_datatrove.table import Table

QUEUED = "queued.json"
"""In a stage's folder: the last job of those that were queued."""
GIVEN = ("pipeline", "tasks", "logging_dir", "job_name", "depends", "skip_completed", "job_id_position")
"""What the table's own keys and the phases decide."""


def queue(work: Work, table: Table, again: bool) -> dict[str, Any]:
    """Queue the tasks that are not complete.

    Args:
        work: a stage with such tasks.
        table: has `[slurm]`.
        again: also where they were queued before.

    Returns:
        What was queued: tasks by phase, and the last job.

    Raises:
        JobError: an option of `[slurm]` cannot be used.
        ForgeError: they were queued before, or `sbatch` failed.
    """
    [options], problems = read_options(table.node("slurm"), [SlurmPipelineExecutor], GIVEN, table.catalog)
    demand([*placed(problems, "slurm")])
    missing = incomplete_tasks(work)
    record = work.folder / QUEUED
    # Two arrays would write the same files
    if record.is_file() and not again:
        job = json.loads(record.read_text())["job"]
        raise ForgeError(
            f"data {work.name}: job {job} was queued, and {_listed(missing)} are not complete; wait for it (squeue), "
            f"or look at {work.folder / WORK} and queue them with --again"
        )
    with owned(work.folder):
        write_atomically(work.folder / BEGUN, json.dumps(work.begun(), indent=1))
        last: Any = None
        for phase in work.phases:
            last = SlurmPipelineExecutor(
                list(phase.steps),
                tasks=phase.tasks,
                logging_dir=str((work.folder / WORK / phase.name).absolute()),
                job_name=f"forge-{work.name}-{phase.name}",
                depends=last,
                **{"workers": phase.workers or -1, **options},
            )
        try:
            # It queues the phases before it first, whose tasks may all be complete
            last.run()
        except (OSError, subprocess.CalledProcessError) as error:
            raise ForgeError(f"data {work.name}: sbatch failed: {error}") from error
        queued = {"queued": missing, "job": str(last.job_id)}
        write_atomically(record, json.dumps(queued))
    return queued


def _listed(missing: dict[str, int]) -> str:
    return ", ".join(f"{count} tasks of {name}" for name, count in missing.items())
