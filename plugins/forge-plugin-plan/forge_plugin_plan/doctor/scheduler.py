"""Checks of the launcher's and the scheduler's variables."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping

from forge_core.contracts.errors import JobError
from forge_core.launch.world import join_world
from forge_kit.tools.slurm_step import tasks_of_shell
from forge_plugin_plan.doctor.results import Result, Surroundings, failed, not_run, ok, warning

ANSWER_S = 10
"""Seconds in which scontrol must answer."""
SOON_S = 600


def check_launcher(surroundings: Surroundings) -> Iterator[Result]:
    """Check whether the environment variables that define the rank of a process are consistent."""
    try:
        world = join_world(dict(surroundings.environment))  # a copy: it adds variables
    except JobError as error:
        yield failed(
            "launcher", str(error), "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT, or set them all"
        )
        return
    if world.alone:
        yield ok("launcher", "this process is alone: ranks are started with --nproc, torchrun or srun")
    else:
        yield ok("launcher", f"rank {world.rank} of {world.size}, which meet at {world.address}:{world.port}")


def check_slurm(surroundings: Surroundings) -> Iterator[Result]:
    """Whether the allocation is used, lasts, and would be started again."""
    variables = surroundings.environment
    job = variables.get("SLURM_JOB_ID")
    if job is None:
        yield ok("scheduler", "none (no SLURM_JOB_ID)")
        return
    yield ok("scheduler", f"SLURM job {job} on {variables.get('SLURM_JOB_NUM_NODES', '?')} nodes")
    tasks = tasks_of_shell(variables)
    if tasks > 1:
        mend = "start runs with `srun forge-run …`, which makes each task a rank"
        yield warning("tasks", f"this is the shell of a job of {tasks} tasks, and not one of them", mend)
    yield _time_left(variables)
    yield _requeue(job)


def _time_left(variables: Mapping[str, str]) -> Result:
    end = variables.get("SLURM_JOB_END_TIME", "")
    if not end.isdecimal():
        return not_run("time limit", "SLURM_JOB_END_TIME is not set, so the end of the job is not known")
    left = int(end) - time.time()
    seen = f"{left / 60:,.0f} minutes are left"
    mend = "take a longer limit (sbatch --time), and have it stop the run in time: --signal=USR1@120"
    return warning("time limit", seen, mend) if left < SOON_S else ok("time limit", seen)


def _requeue(job: str) -> Result:
    if shutil.which("scontrol") is None:
        return not_run("requeue", "scontrol is not on the PATH")
    try:
        command = ["scontrol", "show", "job", job]
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return not_run("requeue", f"scontrol did not answer in {ANSWER_S} s")
    if "Requeue=1" in done.stdout:
        return ok("requeue", "after the failure of a node, SLURM starts the job again, and the run continues")
    if "Requeue=0" in done.stdout:
        return warning("requeue", "after the failure of a node, the job is not started again", "sbatch --requeue")
    return not_run("requeue", f"scontrol does not know job {job}: {done.stderr.strip()[:100]}")
