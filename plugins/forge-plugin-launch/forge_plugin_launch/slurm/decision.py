"""The action after an attempt: a function of its outcome, of the attempts before it, and of the policy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from attrs import evolve, frozen

from forge_core.contracts.errors import ExitCode
from forge_core.contracts.run_end import Cause, End
from forge_plugin_launch.slurm.records import SlurmAttempt

Requeued = Literal["preempted", "time", "failed", "node"]
REQUEUED: tuple[Requeued, ...] = get_args(Requeued)
"""Kinds of end after which a job can be queued again."""
QUEUED, HELD, ENDED = "queued again", "held", "ended"
GOOD = (ExitCode.FINISHED, ExitCode.STOPPED)
TWICE = 2
BY_HAND = ("SIGUSR1", "SIGINT")
"""Signals that a person sends, and no scheduler."""
_MACHINE = re.compile(r"CUDA|NCCL|cuDNN|ECC|HIP error|Bus error|Input/output error|Stale file handle")
"""Words of torch and of the kernel for errors of which the machine may be the cause, and not only the job."""
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")


@frozen(kw_only=True)
class Policy:
    """Settings of the cluster file that decide about another start."""

    requeue: tuple[str, ...] = REQUEUED
    max_idle_restarts: int = 3


@frozen(kw_only=True)
class Outcome:
    """The end of an attempt, as its batch script sees it."""

    code: int
    """Exit code of srun."""
    queued: bool = False
    """Whether SLURM itself has queued the job again."""
    ended_by_slurm: bool = False
    due_to: str = ""
    """SLURM's reason for ending the job; empty where it has none, as after `scancel`."""
    preempted: bool = False
    """Whether SLURM has noted a preemption."""
    terminated: bool = False
    """Whether the batch script was sent SIGTERM."""
    seconds_left: float | None = None
    """Until the time limit, when it ended."""
    end: End | None = None
    """What the run recorded about its end; None if it recorded nothing in this attempt."""
    trained: bool = False
    """Whether the last step was saved, so that only the work at the end of the run was left."""
    killed: str = ""
    """Words about tasks that were killed: `task 3 on gpu07: Killed`."""
    failed_nodes: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
    """Nodes on which the first failure was."""

    @property
    def error(self) -> str:
        """The first error in one line; empty where tasks were killed, since what others report follows from that."""
        return "" if self.killed or self.end is None or self.end.code in GOOD else self.end.reason

    @property
    def error_step(self) -> int | None:
        """Completed steps at the first error."""
        return None if self.end is None or self.end.code in GOOD else self.end.step


def decide(attempt: SlurmAttempt, outcome: Outcome, before: Sequence[SlurmAttempt], policy: Policy) -> SlurmAttempt:
    """Completes an attempt by kind, reason, action and blamed nodes.

    Args:
        attempt: Its facts (steps, times) are complete.
        outcome: How it ended.
        before: Earlier attempts of the run, the first one first.
        policy: What to queue again.
    """
    kind, words = classify(outcome)
    error = "" if kind in ("finished", "preempted", "cancelled") else outcome.error or outcome.killed
    attempt = evolve(attempt, code=outcome.code, kind=kind, error=error)
    attempt = evolve(attempt, error_step=outcome.error_step, blamed=_blamed(kind, outcome))
    if kind not in REQUEUED:
        return evolve(attempt, action=ENDED, reason=words)
    if kind not in policy.requeue and not outcome.queued:
        return evolve(attempt, action=ENDED, reason=f"{words}; `requeue` of the cluster file does not name {kind!r}")
    if same := _same_error(attempt, before):
        return evolve(attempt, action=ENDED, reason=f"{words}; {same}")
    idle = _idle_restarts([*before, attempt])
    # Held and not ended, so that `scontrol release` continues the same job once the cause is gone
    if kind in ("failed", "time") and idle > policy.max_idle_restarts:
        held = f"held after {idle} starts in a row that ended before a checkpoint; `scontrol release {attempt.job}`"
        return evolve(attempt, action=HELD, reason=f"{words}; {held} once it is fixed")
    return evolve(attempt, action=QUEUED, reason=words, excluded=_to_exclude([*before, attempt]))


def classify(outcome: Outcome) -> tuple[str, str]:
    """Returns the kind of an end, and words for it."""
    # From certain to inferred causes: a run that has ended for good is not started again, whatever SLURM did.
    if outcome.code == ExitCode.FINISHED and outcome.end is not None and outcome.end.code == ExitCode.FINISHED:
        return "finished", f"ended for good: {outcome.end.reason}" if outcome.end.final else "finished"
    if outcome.code == ExitCode.BAD_JOB:
        return "bad job", f"the job is wrong, or not the same on all ranks: {outcome.error}".rstrip(": ")
    if outcome.code == ExitCode.NON_FINITE:
        return "non-finite", outcome.error or "loss or gradients stayed non-finite"
    if outcome.due_to == "NODE FAILURE" or outcome.failed_nodes:
        return "node", f"node failure{_on(outcome.failed_nodes)}"
    if outcome.due_to == "TIME LIMIT":
        saved = "" if outcome.code == ExitCode.STOPPED else ", before it was saved: raise hooks.slurm.margin_s"
        return "time", f"the time limit was reached{saved}"
    if outcome.preempted or outcome.due_to == "PREEMPTION" or outcome.queued:
        saved = "" if outcome.code == ExitCode.STOPPED else ", not saved"
        by = "preempted" if outcome.preempted or outcome.due_to == "PREEMPTION" else "queued again by SLURM"
        return "preempted", by + saved
    if outcome.ended_by_slurm:
        return "cancelled", "cancelled by scancel"
    if outcome.code == ExitCode.SECOND_SIGNAL:
        return "stopped", "ended by a second signal"
    if outcome.code == ExitCode.STOPPED:
        return _stopped(outcome)
    if outcome.terminated:
        return "preempted", "SIGTERM, not saved"
    what = outcome.killed or outcome.error or f"srun ended with exit code {outcome.code}, and the run recorded no end"
    step = f" after step {outcome.error_step}" if outcome.error_step is not None else ""
    return "failed", f"failed{step}: {what}"


def _stopped(outcome: Outcome) -> tuple[str, str]:
    """The run has stopped by request, and SLURM has not said why."""
    end = outcome.end
    if end is None:  # counts as a start that came no further: it may be so every time
        return "failed", "stopped, and the run recorded no end"
    if end.cause == Cause.TIME:
        return "time", end.reason
    if end.cause == Cause.REQUEST:
        return "failed", f"stopped to be started again: {end.reason}"  # by a hook; counts if it comes no further
    if end.signal in BY_HAND:
        # `sbatch --signal=USR1@300` of a job that has no hook: near the end it is no person's signal
        if outcome.seconds_left is not None and outcome.seconds_left < 600:
            return "time", f"{end.reason} near the time limit"
        return "stopped", f"stopped by hand ({end.reason}): submit it again to continue"
    return "preempted", end.reason


def _on(nodes: Sequence[str]) -> str:
    return f" on {', '.join(nodes)}" if nodes else ""


def _blamed(kind: str, outcome: Outcome) -> tuple[str, ...]:
    if kind == "node":
        return outcome.failed_nodes
    # A task killed after the last step, such as an export, was too large or too slow: other nodes would do no better
    if kind != "failed" or outcome.trained:
        return ()
    silent = outcome.end is not None and outcome.end.cause == Cause.SILENT
    return outcome.suspects if silent or outcome.killed or _MACHINE.search(outcome.error) else ()


def _same_error(attempt: SlurmAttempt, before: Sequence[SlurmAttempt]) -> str:
    """Why the job or the data are the cause: the last start ended in the same error after the same step."""
    last = before[-1] if before else None
    if attempt.kind != "failed" or not attempt.error or last is None or last.action != QUEUED:
        return ""
    if last.kind != "failed" or (last.error_step, _plain(last.error)) != (attempt.error_step, _plain(attempt.error)):
        return ""
    # Killed tasks and failed devices are no evidence of this; failures before training may come from the file system
    if attempt.blamed or attempt.error_step is None:
        return ""
    return "the same error after the same step as in the last start: the job or its data is the cause, and no machine"


def _plain(error: str) -> str:
    # Addresses, ports and ranks in a message differ from one start to the next
    return _NUMBERS.sub("#", error)


def _idle_restarts(attempts: Sequence[SlurmAttempt]) -> int:
    """Attempts at the end that failed or ran out of time without a new checkpoint, since one was held or ended."""
    count = 0
    for number, attempt in enumerate(reversed(attempts)):
        # The latest attempt has no action yet, as it is being decided on
        if attempt.progressed or (number and attempt.action != QUEUED):
            break
        count += attempt.kind in ("failed", "time")  # who is preempted at the start is not at fault
    return count


def _to_exclude(attempts: Sequence[SlurmAttempt]) -> tuple[str, ...]:
    """Nodes to leave out from now on: blamed twice."""
    already = {node for attempt in attempts for node in attempt.excluded}
    return tuple(node for node in _nodes(attempts) if node not in already)


def _nodes(attempts: Sequence[SlurmAttempt]) -> Iterator[str]:
    counts: dict[str, int] = {}
    for attempt in attempts:
        # A node counts once in an attempt, however many of its ranks have failed
        for node in dict.fromkeys(attempt.blamed):
            counts[node] = counts.get(node, 0) + 1
    yield from (node for node, count in counts.items() if count >= TWICE)
