"""The program that a batch script of `forge-run submit` becomes: starts srun, waits, decides, and queues again.

python -m forge_plugin_launch.slurm.attempt RUN [--max-idle-restarts N] [--requeue KIND,…] -- srun …

It imports no torch: it must start, and note what happened, on a node whose GPUs or libraries are broken.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from attrs import asdict, evolve

from forge_core.checkpoint.run_folder import RunFolder
from forge_core.contracts.errors import ExitCode, JobError
from forge_core.contracts.run_end import ATTEMPT, End
from forge_kit.tools.run_owner import metrics_file
from forge_plugin_launch.slurm import scheduler
from forge_plugin_launch.slurm.decision import ENDED, GOOD, HELD, QUEUED, REQUEUED, Outcome, Policy, decide
from forge_plugin_launch.slurm.log_facts import LogFacts, read_log
from forge_plugin_launch.slurm.records import (
    CURRENT,
    FOLDER,
    PROGRESS,
    SlurmAttempt,
    append_attempt,
    attempt_of,
    last_metrics,
    read_attempts,
    read_json,
    write_json,
)
from forge_plugin_launch.slurm.scheduler import SlurmError

WORDS_S = 1.0
"""Seconds in which SLURM writes its line about the end of a job to the log."""
TRIES = 5
TRY_S = 3.0
LATE_S = 300.0
"""Seconds that the other tasks have once one has ended with an error: a frozen one would keep the nodes."""
LOOK_S = 10.0
TWICE_S = 0.3
"""Between two SIGINT that srun takes for a request to kill all tasks: less than a second."""
END_S = 120.0
"""Seconds in which SLURM ends a job that was queued again."""


class BatchStep:
    """This process as the batch script: its signals, and srun below it."""

    def __init__(self) -> None:
        self.terminated = False
        self._srun: subprocess.Popen | None = None

    def run(self, command: Sequence[str], a_task_failed: Callable[[], bool] = lambda: False) -> int:
        """Run srun to its end, and return its exit code; tasks that stay once one has failed are killed."""
        # SIGTERM must not end this process, as it would a shell: somebody has to note what happened, and SLURM ends
        # steps before their batch script anyway. It is not passed on, since SLURM sends it to the ranks itself, and a
        # second signal would end them without a save.
        signal.signal(signal.SIGTERM, self._on_term)
        for number in (signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._pass_on)
        self._srun = subprocess.Popen(command)
        code = self._wait(a_task_failed)
        return code if code >= 0 else 128 - code  # as a shell has it: 143 after SIGTERM

    def _wait(self, a_task_failed: Callable[[], bool]) -> int:
        assert self._srun is not None
        failed_at: float | None = None
        while True:
            with suppress(subprocess.TimeoutExpired):
                return self._srun.wait(LOOK_S)
            if failed_at is None and a_task_failed():
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > LATE_S:
                text = f"tasks are left {LATE_S:g} s after another has failed, and are killed"
                print(f"forge-run submit: {text}", file=sys.stderr, flush=True)
                self._srun.send_signal(signal.SIGINT)
                time.sleep(TWICE_S)
                self._srun.send_signal(signal.SIGINT)
                failed_at = time.monotonic()  # should that not have been enough

    def wait_for_end(self, seconds: float) -> None:
        """Wait until SLURM ends this job, which was queued again: an exit would count as the job's own."""
        deadline = time.monotonic() + seconds
        while not self.terminated and time.monotonic() < deadline:
            time.sleep(0.1)

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self.terminated = True

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        # `scancel --batch --signal=USR1`, or `sbatch --signal=B:USR1@300`, reach only this process
        if self._srun is not None and self._srun.poll() is None:
            self._srun.send_signal(number)


def main(argv: Sequence[str]) -> int:
    """Run one attempt; returns the exit code of the batch script."""
    options, command = _parse(argv)
    run: Path = options.run
    policy = Policy(
        requeue=tuple(filter(None, options.requeue.split(","))), max_idle_restarts=options.max_idle_restarts
    )
    log = log_file()
    # All attempts write to one log: earlier ones are before this place
    offset = log.stat().st_size if log else 0
    if other := other_job(run, scheduler.own_job(os.environ)):
        print(
            f"forge-run submit: {run} is in use by job {other}, which is running; nothing was started", file=sys.stderr
        )
        return ExitCode.FAILED
    # Before `begin`, which overwrites the record of an attempt that was killed
    before = close_unfinished(run)
    attempt = begin(run, os.environ, log)
    if refusal := _refused_restart(attempt, before, policy):
        _end(run, evolve(attempt, ended=time.time(), kind=before[-1].kind, action=ENDED, reason=refusal))
        return ExitCode.FAILED
    batch = BatchStep()
    os.environ[ATTEMPT] = name_of(attempt)  # srun passes it on to the ranks, which record it with their end
    code = batch.run(command, lambda: bool(read_log(log, offset).hosts))
    outcome = observe(run, attempt, code, batch, log, offset)
    attempt = decide(_with_steps(run, attempt, outcome), outcome, before, policy)
    _end(run, attempt)
    if attempt.action in (QUEUED, HELD) and not (outcome.queued and attempt.action == QUEUED):
        _queue_again(attempt, batch)
    return code


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser("python -m forge_plugin_launch.slurm.attempt", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--max-idle-restarts", type=int, default=Policy().max_idle_restarts)
    parser.add_argument("--requeue", default=",".join(REQUEUED))
    own, dashes, command = list(argv), "--" in argv, list[str]()
    if dashes:
        place = own.index("--")
        own, command = own[:place], own[place + 1 :]
    options = parser.parse_args(own)
    if not command:
        parser.error("give the command after --: -- srun …")
    return options, command


def log_file() -> Path | None:
    """Returns the file into which this process and SLURM write; None if it is a terminal or a pipe."""
    path = Path(os.readlink(f"/proc/self/fd/{sys.stderr.fileno()}"))
    return path if path.is_file() and str(path) != os.devnull else None


# --- begin and end -----------------------------------------------------------------------------------------------


def begin(run: Path, environment: Mapping[str, str], log: Path | None) -> SlurmAttempt:
    """Notes that an attempt begins, so that one whose node dies is known too."""
    attempt = SlurmAttempt(
        job=scheduler.own_job(environment),
        restart=int(environment.get("SLURM_RESTART_COUNT", "0")),
        nodes=environment.get("SLURM_JOB_NODELIST", ""),
        began=time.time(),
        log=str(log or ""),
    )
    write_json(run / FOLDER / CURRENT, asdict(attempt))
    return attempt


def name_of(attempt: SlurmAttempt) -> str:
    """The name of an attempt in what the run records."""
    return f"{attempt.job}.{attempt.restart}"


def other_job(run: Path, own: str) -> str:
    """Returns another job that runs in this folder at this moment; empty if none does."""
    job = read_json(run / FOLDER / CURRENT).get("job", "")
    with suppress(SlurmError):
        if job and job != own and scheduler.job_facts(job).get("JobState") == "RUNNING":
            return job
    return ""


def close_unfinished(run: Path) -> list[SlurmAttempt]:
    """Returns the earlier attempts; one that was killed before it could note its end gets its line now."""
    left = read_json(run / FOLDER / CURRENT)
    if left:
        attempt = _with_steps(run, attempt_of(left), Outcome(code=1))
        words = "node failure: killed with its batch script, without last words"
        _end(run, evolve(attempt, kind="node", ended=_last_sign(run, attempt.began), action=QUEUED, reason=words))
    return read_attempts(run)


def _last_sign(run: Path, began: float) -> float:
    """When a run was last heard of."""
    times = [began]
    with suppress(OSError, JobError):
        times.append(metrics_file(run).stat().st_mtime)
    with suppress(OSError):
        times.append((run / FOLDER / PROGRESS).stat().st_mtime)
    return max(times)


def _end(run: Path, attempt: SlurmAttempt) -> None:
    # In this order: killed in between, this process leaves two lines and not none
    append_attempt(run, attempt)
    (run / FOLDER / CURRENT).unlink(missing_ok=True)
    print(f"forge-run submit: {attempt.reason}; {attempt.action}", file=sys.stderr, flush=True)


def _refused_restart(attempt: SlurmAttempt, before: Sequence[SlurmAttempt], policy: Policy) -> str:
    """Why SLURM should not have started this job again, which it did by itself (`--requeue`)."""
    last = before[-1] if before else None
    if last is None or last.job != attempt.job or attempt.restart == 0 or last.action != QUEUED:
        return ""
    return "" if last.kind in policy.requeue else f"`requeue` of the cluster file does not name {last.kind!r}"


def _with_steps(run: Path, attempt: SlurmAttempt, outcome: Outcome) -> SlurmAttempt:
    progress = read_json(run / FOLDER / PROGRESS)
    if (progress.get("job"), progress.get("restart")) != (attempt.job, attempt.restart):
        return evolve(attempt, ended=time.time())  # training did not begin
    reached = progress.get("ended") or outcome.error_step or last_metrics(run).get("step")
    began, saved = progress["began"], progress["saved"]
    return evolve(attempt, ended=time.time(), step_began=began, step_ended=max(reached or 0, saved), saved=saved)


# --- what happened -----------------------------------------------------------------------------------------------


def observe(run: Path, attempt: SlurmAttempt, code: int, batch: BatchStep, log: Path | None, offset: int) -> Outcome:
    """Collects what the controller, the log and the ranks say about the end of an attempt."""
    facts, left = _controller_facts(attempt.job)
    if batch.terminated or (code not in (ExitCode.FINISHED, ExitCode.STOPPED) and facts.get("JobState") != "RUNNING"):
        # SLURM is ending the job: its controller and its line in the log may lag behind the end of srun
        time.sleep(WORDS_S)
        facts, left = _controller_facts(attempt.job)
    words = read_log(log, offset)
    end = _end_of(run, attempt)
    return Outcome(
        code=code,
        queued=scheduler.restarts(facts) > attempt.restart,
        ended_by_slurm=words.ended_by_slurm,
        due_to=words.due_to,
        preempted=facts.get("PreemptTime", "None") not in ("None", "Unknown"),
        terminated=batch.terminated,
        seconds_left=left,
        end=end,
        trained=_trained(run, attempt),
        killed="; ".join(f"task {task} on {node}: {cause}" for task, (node, cause) in sorted(words.killed.items())[:4]),
        failed_nodes=words.failed_nodes,
        suspects=_suspects(words, end),
    )


def _trained(run: Path, attempt: SlurmAttempt) -> bool:
    """Whether this attempt has saved the last step."""
    progress = read_json(run / FOLDER / PROGRESS)
    is_own = (progress.get("job"), progress.get("restart")) == (attempt.job, attempt.restart)
    return is_own and progress["saved"] >= progress.get("steps", math.inf)


def _controller_facts(job: str) -> tuple[dict[str, str], float | None]:
    try:
        facts = scheduler.job_facts(job)
        limit, ran = (scheduler.parse_duration(facts.get(name, "")) for name in ("TimeLimit", "RunTime"))
    except SlurmError as error:
        print(f"forge-run submit: {error}; going by the log alone", file=sys.stderr, flush=True)
        return {}, None
    return facts, None if limit is None or ran is None else limit - ran


def _end_of(run: Path, attempt: SlurmAttempt) -> End | None:
    """What the run recorded about its end, if that was in this attempt."""
    end = RunFolder(run).end()
    if end is None or end.attempt not in (name_of(attempt), ""):
        return None
    # Without a name srun was told to pass no variables on (`--export`)
    return end if end.attempt or end.ended >= attempt.began else None


def _suspects(words: LogFacts, end: End | None) -> tuple[str, ...]:
    if words.killed:
        return tuple(dict.fromkeys(node for node, _ in words.killed.values()))
    # SLURM's name of the node first: a machine may have another one
    return () if end is None or end.code in GOOD else (words.hosts.get(end.rank) or end.host,)


# --- queue again -------------------------------------------------------------------------------------------------


def _queue_again(attempt: SlurmAttempt, batch: BatchStep) -> None:
    """Queue this job again, held if need be, and wait until SLURM ends it."""
    for last in (False,) * (TRIES - 1) + (True,):
        try:
            scheduler.requeue(attempt.job, hold=attempt.action == HELD)
            break
        except SlurmError as error:
            if last:
                hint = f"continue manually: sbatch {sys.argv[1] if len(sys.argv) > 1 else 'RUN'}/submit.sh"
                print(f"forge-run submit: job {attempt.job} was not queued again: {error}; {hint}", file=sys.stderr)
                return
            time.sleep(TRY_S)
    if attempt.excluded:  # only now: SLURM takes such a change for a job that waits
        _exclude(attempt)
    batch.wait_for_end(END_S)


def _exclude(attempt: SlurmAttempt) -> None:
    try:
        present = scheduler.job_facts(attempt.job).get("ExcNodeList", "")
        scheduler.exclude(attempt.job, present, attempt.excluded)
        text = f"left out from now on, having failed twice: {', '.join(attempt.excluded)}"
    except SlurmError as error:
        text = f"{', '.join(attempt.excluded)} failed twice and could not be left out: {error}"
    print(f"forge-run submit: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
