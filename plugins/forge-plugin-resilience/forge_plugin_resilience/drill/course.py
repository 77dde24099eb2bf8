"""The course of a drill: the run without a fault, then a separate run for each fault, and its evaluation."""

from __future__ import annotations

import math
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from forge_core.checkpoint.run_folder import RunFolder
from forge_core.contracts.errors import ExitCode, ForgeError, JobError
from forge_core.contracts.run_end import End
from forge_kit.tools.metrics import read_metrics
from forge_plugin_resilience.drill.faults import FAULTS, Fault
from forge_plugin_resilience.drill.folder import LOG
from forge_plugin_resilience.drill.records import INJECTED, STEPS, Event, Evidence, Record, read_records
from forge_plugin_resilience.drill.results import Curve, Result, deviation, first_difference
from forge_plugin_resilience.drill.run_process import RunProcess
from forge_plugin_resilience.drill.subject import Subject

LEAST_HANG_S = 20.0
"""Shortest limit on hangs that a drill sets for faults that are found by one."""
FAREWELL_S = 4.0
"""Seconds that ranks have to end by themselves once one has failed, for the estimate."""
ROUNDING = 10.0
"""How many times as far as two runs without a fault a run may be from them."""


@frozen(kw_only=True)
class Case:
    """A fault that is to hit a rank."""

    fault: Fault
    rank: int

    @property
    def key(self) -> str:
        """Names the job, the run and the folder of the case; `--only` takes it, too: `killed-1`."""
        return f"{self.fault.name}-{self.rank}"

    def title(self, subject: Subject) -> str:
        """For the table."""
        return self.fault.title + ("" if self.fault.hits_all or subject.ranks == 1 else f", rank {self.rank}")


@define(kw_only=True)
class Baseline:
    """A run without a fault."""

    curve: Curve
    start_s: float
    """From its start to the beginning of training."""
    step_s: float
    """Median."""
    longest_s: float
    """Longest time in which no step was completed, the first step included."""
    seconds: float


def cases_of(subject: Subject, only: Sequence[str]) -> tuple[list[Case], dict[str, str]]:
    """Returns the cases that apply to a job, and why other faults do not, by title."""
    cases: list[Case] = []
    refused: dict[str, str] = {}
    for name, cls in FAULTS.items():
        fault = cls()
        # From the right: names have dashes, too (`frozen-at-end-1`)
        ranks = [case for case in only if case == name or case.rpartition("-")[0] == name]
        if only and not ranks:
            continue
        if reason := fault.refusal(subject):
            refused[name] = reason
        else:
            every = [Case(fault=fault, rank=rank) for rank in fault.ranks(subject)]
            chosen = [case for case in every if not only or name in only or case.key in only]
            if not chosen:
                known = ", ".join(case.key for case in every)
                raise JobError(
                    f"--only: {' and '.join(ranks)} is no fault of this job on {subject.ranks} ranks: {known}"
                )
            cases += chosen
    return cases, refused


@define(kw_only=True)
class Course:
    """A drill in its folder."""

    subject: Subject
    patience_s: float
    """Seconds beyond all expected ones after which a run counts as hanging."""
    show: Callable[[str], object]
    """Receives what happens at the moment, a few times a second."""
    _baseline: Baseline | None = field(default=None, init=False)
    _spread: float | None = field(default=None, init=False)
    """How far apart two runs without a fault are; None: only one was made."""

    # --- runs ----------------------------------------------------------------------------------------------------

    def baseline(self, key: str = "baseline") -> Baseline:
        """Train without a fault.

        Raises:
            ForgeError: that fails.
        """
        subject = self.subject
        files = subject.write(key, {"steps": subject.steps}, {})
        attempt = self._run(files, key, 1, math.inf)
        if attempt.code != ExitCode.FINISHED:
            last = attempt.last_lines(8)
            raise ForgeError(f"the job fails without any fault, with exit code {attempt.code}:\n{last}\n{attempt.log}")
        records = self._records(key)
        times = [record.time for record in records if record.event in (Event.BEGIN, Event.STEP)]
        gaps = [after - before for before, after in pairwise(times)]
        made = Baseline(
            curve=self._curve(key),
            start_s=times[0] - attempt.began,
            step_s=statistics.median(gaps),
            longest_s=max(gaps),
            seconds=attempt.ended - attempt.began,
        )
        self._baseline = self._baseline or made  # the first one stays the reference of all curves
        return made

    def estimate_s(self, cases: Sequence[Case]) -> float:
        """Seconds that the cases will take, by the run without a fault."""
        base = self._known
        total = 0.0
        for case in cases:
            # Only a run that has to finish is started once; after any other fault it may have to be restarted
            starts = 1 if ExitCode.FINISHED in case.fault.ends and len(case.fault.ends) == 1 else 2
            total += base.seconds + (starts - 1) * (base.seconds - self.subject.steps / 2 * base.step_s)
            total += self._limit_s(case.fault) + FAREWELL_S
        return total

    def run(self, case: Case) -> Result:
        """Inject one fault, start the run again if it has ended, and judge."""
        fault, subject = case.fault, self.subject
        result = Result(fault=fault.name, rank=case.rank, title=case.title(subject))
        step = subject.step_of(fault)
        table = {"steps": subject.steps_of(fault), "fault": fault.name, "step": step, "rank": case.rank}
        keys = {**fault.keys(subject), **self._limits(fault)}
        differing = [f"{path} = {value} and not {subject.value(path)}" for path, value in keys.items()]
        result.note = f"with {', '.join(differing)}" if differing else ""
        files = subject.write(case.key, table, keys)
        first = self._run(files, case.key, 1, self._time_for(fault))
        last = first
        # Without its record the fault never happened, and the exit code proves nothing
        if not self._injected(case):
            result.log = str(first.log)
            result.fail(f"the run ended with exit code {first.code} before the fault was injected")
            return result
        self._judge_first(case, first, result)
        reached = self._last_step(case.key)
        if first.code not in (None, ExitCode.FINISHED):
            # After the end and before the restart, which must find the damage
            fault.between(subject, str(subject.run_folder(case.key)))
            last = self._restart(case, files, result, reached)
        result.log = str(last.log)
        if last.code == ExitCode.FINISHED:
            self._judge_curve(case, result)
        result.held = not result.reason
        return result

    def _run(self, files: Sequence[Path], key: str, number: int, limit_s: float) -> RunProcess:
        """One start of the job of a fault; its limit is in seconds from the injection, or else from its start."""
        injected = self.subject.folder / key / INJECTED

        def deadline() -> float:
            # A restart finds the record of the injection, too: its limit must not count from there
            marks = read_records(injected) if number == 1 else []
            if marks:
                return marks[0].time + limit_s
            # The first run without a fault has no deadline: nothing is known yet of its duration
            expected = self._baseline.seconds if self._baseline else math.inf
            return attempt.began + 5 * expected + self.patience_s

        def show() -> None:
            steps = self._last_step(key)
            doing = f"step {steps} of {self.subject.steps}" if steps else "starting"
            text = f"{doing}, restarted" if number > 1 else doing
            self.show("waiting for its end" if number == 1 and injected.exists() else text)

        with RunProcess(files, self.subject.ranks, self.subject.folder / key / LOG.format(number=number)) as attempt:
            attempt.wait(deadline, show)
        return attempt

    def _restart(self, case: Case, files: Sequence[Path], result: Result, reached: int) -> RunProcess:
        """Give the same command again, as a user would."""
        moment, records = time.time(), len(self._records(case.key))
        attempt = self._run(files, case.key, 2, math.inf)
        own = self._records(case.key)[records:]  # both starts append to one file
        begun = [record for record in own if record.event == Event.BEGIN]
        steps = [record for record in own if record.event == Event.STEP]
        if case.fault.name == "damaged":
            self._judge_damaged(case, begun, moment, reached, result)
        if begun:
            result.steps_lost = reached - begun[-1].step
            if case.fault.saves_all and result.steps_lost:
                result.fail(f"{result.steps_lost} steps were lost, though the run had time to save")
            elif begun[-1].step == 0:
                result.fail("the run started over", "set checkpoint.interval, and check why no checkpoint was made")
        if steps:
            result.back_after_s = steps[0].time - attempt.began
        if attempt.code != ExitCode.FINISHED:
            end = self._end(case.key)
            last = end.reason if end is not None else attempt.last_lines(1)
            ended = "did not end" if attempt.code is None else f"ended with exit code {attempt.code}"
            result.fail(f"the same command {ended} when it was given again: {last}", case.fault.hint)
        self._judge_left(attempt, result)
        return attempt

    def _judge_damaged(self, case: Case, begun: Sequence[Record], moment: float, reached: int, result: Result) -> None:
        """Whether the restart passes over the damaged checkpoint, which is of step `reached`, or refuses to begin."""
        if begun and begun[-1].step >= reached:
            result.fail("the damage was not found", case.fault.hint)
            return
        result.found_after_s = (begun[-1].time if begun else time.time()) - moment
        result.said = f"the damaged checkpoint of step {reached} was not used"

    # --- judgement -----------------------------------------------------------------------------------------------

    def _judge_first(self, case: Case, attempt: RunProcess, result: Result) -> None:
        """The end of the run that was hit."""
        fault, evidence = case.fault, self._evidence(case)
        injected, finding = evidence.injected, fault.finding(evidence, case.rank)
        if attempt.code is None:
            waited = attempt.ended - injected.time
            result.fail(f"nothing happened for {waited:.0f} s, and all processes were killed then", fault.hint)
        elif attempt.code not in fault.ends:
            allowed = " or ".join(_code(code) for code in fault.ends)
            result.fail(f"the run ended with {_code(attempt.code)} instead of {allowed}", fault.hint)
        elif attempt.code == ExitCode.FINISHED:
            result.found_after_s = finding.time - injected.time if finding and finding.time else None
        else:
            result.found_after_s = attempt.ended - injected.time
        if finding is not None:
            result.said = finding.text
        elif attempt.code is not None and fault.missing and not self._is_alone_and_killed(attempt):
            end = evidence.end
            other = f"; its record is {end.cause.value}, rank {end.rank}: {end.reason}" if end is not None else ""
            result.fail(f"{fault.missing}{other}", fault.hint)
        if objection := fault.objection(evidence):
            result.fail(objection, fault.hint)
        if not result.said and attempt.code not in (None, 0):
            result.said = _code(attempt.code or 0)
        self._judge_left(attempt, result)

    def _evidence(self, case: Case) -> Evidence:
        try:
            rows: Sequence[Mapping[str, Any]] = read_metrics(self.subject.run_folder(case.key))
        except ForgeError:  # it was hit before its first line
            rows = ()
        injected, records = self._injected(case), self._records(case.key)
        assert injected is not None
        end, ranks = self._end(case.key), self.subject.ranks
        return Evidence(injected=injected, end=end, records=records, rows=rows, ranks=ranks)

    def _is_alone_and_killed(self, attempt: RunProcess) -> bool:
        """Whether nobody is left who could record the end."""
        return self.subject.ranks == 1 and attempt.code == -signal.SIGKILL

    def _judge_left(self, attempt: RunProcess, result: Result) -> None:
        if attempt.left:
            result.fail(f"processes {', '.join(map(str, attempt.left))} were left behind, and were killed")

    def _judge_curve(self, case: Case, result: Result) -> None:
        """Compare the losses of a finished run with those without a fault."""
        own, expected = self._curve(case.key), self._known.curve
        step = self.subject.step_of(case.fault)
        if not case.fault.same_curve:
            self._judge_later_curve(own, result, step, case.fault)
            # From the step of such a fault on, the curves differ even if the run did everything right
            own, expected = ({s: v for s, v in curve.items() if s < step} for curve in (own, expected))
        different = first_difference(own, expected)
        until = "" if case.fault.same_curve else f" up to step {step - 1}"
        if different is None:
            result.curve = f"equal to the bit{until}{result.curve}"
            return
        # Only now, since it may cost a second run without a fault
        spread, apart = self._spread_of_baselines(), deviation(own, expected)
        if spread and apart <= ROUNDING * spread:
            result.curve = f"equal{until} up to rounding ({apart:.1e}){result.curve}"
            return
        a, b = own.get(different, math.nan), expected.get(different, math.nan)
        result.curve = f"differs from step {different} on"
        same = "" if spread else ", and two runs without a fault are equal to the bit"
        result.fail(
            f"the loss of step {different} is {a!r} instead of {b!r}{same}",
            "a component keeps state that checkpoints do not hold: see state_dict of hooks and plugins of your own",
        )

    def _judge_later_curve(self, own: Curve, result: Result, step: int, fault: Fault) -> None:
        """The steps after a fault that leaves its mark: all there, finite, and not worse than before it."""
        after = [loss for s, loss in own.items() if s > step]
        if len(own) < self.subject.steps and fault.name == "infinite":
            result.fail(f"{self.subject.steps - len(own)} steps have no line of metrics")
        if not after or not math.isfinite(after[-1]):
            result.fail("the loss is not finite after it")
        elif after[-1] > 1.5 * max(loss for s, loss in own.items() if s < step):
            result.fail(f"the loss is {after[-1]:.3f} at the end, far above the loss of any step before the fault")
        else:
            result.curve = f", {fault.mark}, {after[-1]:.3f} at the end"

    def _spread_of_baselines(self) -> float:
        """How far apart two runs without a fault are; 0: the job is deterministic on this machine."""
        if self._spread is None:
            self.show("the job a second time without a fault: is it deterministic?")
            self._spread = deviation(self.baseline("baseline-2").curve, self._known.curve)
        return self._spread

    @property
    def spread(self) -> float | None:
        """The same; None if no run gave a reason to look."""
        return self._spread

    # --- figures -------------------------------------------------------------------------------------------------

    @property
    def _known(self) -> Baseline:
        assert self._baseline is not None, "the run without a fault comes first"
        return self._baseline

    def _own_limit_s(self, fault: Fault) -> float:
        """The job's own limit by which a fault is found; 0: there is none."""
        launch = self.subject.job.launch
        silence_s = launch.silence_timeout_s if fault.is_silent else 0.0
        return min(silence_s or launch.hang_timeout_s, launch.hang_timeout_s) if fault.waits else 0.0

    def _limit_s(self, fault: Fault) -> float:
        """The limit in the drill: the job's own, or a shorter one that no step of the run reaches."""
        # A drill waits this long for each of these faults, and the job's own limit may be many minutes
        return min(self._own_limit_s(fault), max(LEAST_HANG_S, round(3 * self._known.longest_s)))

    def _limits(self, fault: Fault) -> Mapping[str, Any]:
        """Keys of `[launch]` for a fault that is found by a limit."""
        limit_s = self._limit_s(fault)
        return {} if limit_s == self._own_limit_s(fault) else {"launch.hang_timeout_s": limit_s}

    def _time_for(self, fault: Fault) -> float:
        """Seconds from the injection to the end of the run, at most."""
        rest = 0.0 if ExitCode.FINISHED not in fault.ends else 5 * self._known.seconds + self._limit_s(fault)
        return self._limit_s(fault) + rest + self.patience_s

    def _injected(self, case: Case) -> Record | None:
        return next(iter(read_records(self.subject.folder / case.key / INJECTED)), None)

    def _records(self, key: str) -> Sequence[Record]:
        return read_records(self.subject.folder / key / STEPS)

    def _end(self, key: str) -> End | None:
        return RunFolder(self.subject.run_folder(key)).end()

    def _last_step(self, key: str) -> int:
        steps = (record.step for record in reversed(self._records(key)) if record.event in (Event.BEGIN, Event.STEP))
        return next(steps, 0)

    def _curve(self, key: str) -> Curve:
        rows = read_metrics(self.subject.run_folder(key))
        return {row["step"]: float(row["loss"]) for row in rows}


def _code(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        return f"{signal.Signals(-code).name}"
    return "exit code 0, as if nothing had happened" if code == 0 else f"exit code {int(code)}"
