"""Commands of SLURM, each with a deadline: a controller that is busy or gone must not hold up a run."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

ANSWER_S = 30.0
"""Seconds in which SLURM must answer; its own limit for messages is 10 s by default."""

TRIES = 3


class SlurmError(Exception):
    """SLURM refused a command, or did not answer. The message is its own."""


def ask(*command: str) -> str:
    """Run a command of SLURM and return what it prints; `SlurmError` if it fails."""
    if shutil.which(command[0]) is None:
        raise SlurmError(f"{command[0]} is not on the PATH")
    for _ in range(TRIES):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
        except subprocess.TimeoutExpired:
            raise SlurmError(f"{command[0]} did not answer in {ANSWER_S:.0f} s") from None
        # SLURM's SIGTERM goes to all processes of a batch script, this one too; unlike the script, it does not survive
        if done.returncode >= 0:
            break
    if done.returncode:
        raise SlurmError(done.stderr.strip() or f"{command[0]} ended with exit code {done.returncode}")
    return done.stdout.strip()


def own_job(environment: Mapping[str, str]) -> str:
    """Returns the name of this process's job; empty outside SLURM.

    A task of an array is `17_3`: its own number may be the whole array's, all of which would be queued again.
    """
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")


def job_facts(job: str) -> dict[str, str]:
    """Returns the fields of `scontrol show job` by name; a job that has gone from the controller's memory is an error.

    `JobState` is COMPLETING while processes of the job are left, whatever ended it.
    """
    return dict(re.findall(r"(\w[\w/:]*)=(\S*)", ask("scontrol", "show", "job", "-o", job)))


def queue_state(job: str) -> str:
    """Returns state and reason of a job (`PENDING (BeginTime)`); empty if it is not in the queue."""
    try:
        lines = ask("squeue", "--noheader", "--jobs", job, "--format", "%T|%r|%N").splitlines()
    except SlurmError as error:
        # The error for a job that has left the controller's memory, whichever case its first letter has
        if "nvalid job id" in str(error):
            return ""
        raise
    # COMPLETED jobs may be listed for some minutes when they are asked for by number
    states = [line.split("|") for line in lines if not line.startswith(("COMPLETED", "CANCELLED", "FAILED"))]
    words = {state: f" on {nodes}" if nodes else f" ({reason})" for state, reason, nodes in states}
    return ", ".join(f"{state}{detail}" for state, detail in words.items())


def seconds_left(job: str) -> float | None:
    """Returns the seconds until the time limit of a running job; None if it has no limit."""
    return parse_duration(ask("squeue", "--noheader", "--jobs", job, "--format", "%L"))


def parse_duration(text: str) -> float | None:
    """Returns the seconds of a time as SLURM takes and prints it (`90`, `1:30:00`, `2-12`); None if it is none."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:  # minutes[:seconds]
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return 86400.0 * int(days or 0) + 3600 * hours + 60 * minutes + seconds


def requeue(job: str, hold: bool = False) -> None:
    """Queue a running job again, which ends it; with `hold`, it waits for `scontrol release`."""
    try:
        ask("scontrol", "requeuehold" if hold else "requeue", job)
    except SlurmError as error:
        if "pending" not in str(error).lower():  # SLURM itself was first
            raise


def exclude(job: str, present: str, nodes: Sequence[str]) -> None:
    """Exclude nodes from a job that waits in the queue, in addition to `present` (`ExcNodeList` of the job)."""
    before = [present] if present and present != "(null)" else []
    ask("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join([*before, *nodes])}")


def restarts(facts: Mapping[str, str]) -> int:
    """Returns how often a job was queued again, the time that is under way included."""
    return int(facts.get("Restarts", "0"))
