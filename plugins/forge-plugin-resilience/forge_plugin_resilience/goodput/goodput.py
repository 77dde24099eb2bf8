"""The hook `goodput`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import asdict, define, field
from attrs.validators import and_, gt, le

from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import Problem
from forge_core.contracts.phase import COMPUTING, Phase

if TYPE_CHECKING:
    from pathlib import Path

    from forge_core.contracts.contexts import CheckpointContext, StepContext, TrainContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.run_end import End
    from forge_core.job import Job
    from forge_plugin_resilience.goodput.events import EventLog

WAITS = ("wait_share", "slowest_rank")
"""Metrics of the hook `stragglers` (forge-plugin-resilience), if it runs before this one."""


@define(kw_only=True, slots=False)
class Goodput(TrainingHook):
    """Notes in `events.jsonl` what the run does with its time, over all its starts, for `forge-run profile goodput`.

    Rank 0 writes; a line has the seconds by phase since the one before it. The share of time that was productive so far
    is in the metrics, as `goodput`. If the disk fails, the hook warns and training continues.
    """

    resumes_as = "safe"

    every_s: float = field(default=30.0, validator=and_(gt(0), le(60)))
    """Seconds between lines about steps: at most so much is not known of a process that dies without a word."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if sum(isinstance(hook, Goodput) for hook in job.hooks.values()) > 1:
            yield Problem("", "a run has one events.jsonl, and one hook that writes it: remove the other goodput")

    def on_train_begin(self, context: TrainContext) -> None:
        """Open the file on rank 0 and write how long the start took. Collective: hosts are gathered."""
        from forge_core.parallel.mesh import gather_objects, global_rank, world_size
        from forge_plugin_resilience.goodput.events import EVENTS, EventLog, host_name
        from forge_plugin_resilience.goodput.slurm_facts import slurm_facts

        hosts = list(dict.fromkeys(gather_objects(host_name())))  # on every rank
        self._log: EventLog | None = None
        if global_rank() != 0:
            return
        assert context.folder is not None
        self._log = log = EventLog(context.folder / EVENTS, context.seconds)
        self._gone = 0.0
        # Before this start has a line: the file then holds earlier starts only
        self._productive, self._run_began = _earlier(context.folder / EVENTS, context.step, log.began)
        facts = {"began": log.began, "ranks": world_size(), "hosts": hosts, "from_step": context.step, **slurm_facts()}
        # At the begin of the process, so that imports are part of the start
        log.write("start", log.began, **facts, version=_version())
        log.add("ready", context.seconds, lambda phase: True, step=context.step)
        self._step, self._saved = context.step, context.step
        self._first: int | None = None
        self._count = self._skipped = 0
        self._waits: dict[str, float] = {}
        self._due = 0.0  # the first step has a separate line: it compiles
        self._in_background: dict[int, float] = {}
        self._saving: int | None = None

    def on_checkpoint_begin(self, context: TrainContext) -> None:
        """Note the step of the save; its line follows when it is committed, or else before the next step."""
        if self._log is not None:
            self._saving = context.step

    def on_step_begin(self, context: StepContext) -> None:
        """Write the line of a save that has begun and is not committed: with `async_save` it is in the background."""
        if self._log is None:
            return
        if self._first is None:
            self._first = context.step
        seconds = context.seconds
        if self._saving is None:
            return
        # Not committed: it is being written in the background, or has failed
        step, blocked = self._saving, self._log.not_noted(Phase.SAVE, seconds)
        failed = {} if context.job.checkpoint.async_save else {"failed": True}
        self._note_save(seconds, step, **failed or {"in_background": True})
        if not failed:
            # The time at which the save began: the seconds that it blocked are part of writing it
            self._in_background[step] = sum(seconds.values()) - blocked

    def on_step_end(self, context: StepContext) -> None:
        """Log the productive share so far, and write a line about the steps if it is due."""
        if self._log is None:
            return
        seconds = context.seconds
        self._step = context.step
        self._count += 1
        self._skipped += bool(context.skipped)
        self._waits |= {name: round(context.logged[name], 4) for name in WAITS if name in context.logged}
        total = sum(seconds.values())
        context.log("goodput", self._goodput(seconds, total))
        if total >= self._due:
            self._note_steps(seconds)
            self._due = total + self.every_s

    def _goodput(self, seconds: Mapping[str, float], total: float) -> float:
        assert self._log is not None
        productive = self._productive + sum(seconds.get(phase, 0.0) for phase in COMPUTING) - self._gone
        return productive / max(self._log.now(total) - self._run_began, 1e-9)

    def on_eval_end(self, context: StepContext, metrics: Mapping[str, float]) -> None:
        """Write the steps before the evaluation, then the evaluation."""
        if self._log is not None:
            seconds = context.seconds
            self._note_steps(seconds)
            self._log.add("evaluation", seconds, lambda phase: phase == Phase.EVALUATION, step=context.step)

    def on_checkpoint_save(self, context: CheckpointContext) -> None:
        """Write the line of a save; of one in the background, a line `written` without seconds, when it is whole."""
        if self._log is None:
            return
        from forge_plugin_resilience.goodput.disk import size_of

        seconds = context.seconds
        facts: dict[str, Any] = {"bytes": size_of(context.path)[0]}
        self._saved = context.step
        began = self._in_background.pop(context.step, None)
        if began is None:
            self._note_save(seconds, context.step, **facts)
            return
        facts["write_s"] = round(sum(seconds.values()) - began, 4)
        self._log.add("written", seconds, lambda phase: False, step=context.step, **facts)
        self._log.sync()

    def on_rollback(self, context: TrainContext, step: int, reason: str) -> None:
        """Write what was undone, and take those steps out of the productive time that the metric counts."""
        if self._log is None:
            return
        from forge_plugin_resilience.goodput.accounting import account_of
        from forge_plugin_resilience.goodput.events import EVENTS, read_events

        seconds = context.seconds
        self._note_steps(seconds)
        facts = {"from": context.step, "to": step, "why": reason}
        self._log.add("undone", seconds, lambda phase: phase == Phase.GOING_BACK, step=context.step, **facts)
        assert context.folder is not None
        # With `now`, since the run continues: without it, steps after the last save would count as lost
        now = account_of(read_events(context.folder / EVENTS), now=0.0).classes["productive"]
        self._gone = self._productive + sum(seconds.get(phase, 0.0) for phase in COMPUTING) - now

    def on_train_end(self, context: TrainContext) -> None:
        """Write the end with what `end.json` will have, and close the file."""
        self._end(context, context.end())

    def on_exception(self, context: TrainContext, error: BaseException) -> None:
        """Write the end by the failure report of rank 0, and close the file."""
        from forge_core.launch.failure_report import report_of

        self._end(context, report_of(0, error).end(context.step))

    def _end(self, context: TrainContext, end: End) -> None:
        if self._log is not None:
            self._note_steps(context.seconds)
            # Times and the step are in the line anyway
            facts = {key: value for key, value in asdict(end).items() if key not in ("started", "ended", "step")}
            self._log.add("end", context.seconds, lambda phase: True, step=self._step, saved=self._saved, **facts)
            self._log.close()

    def _note_steps(self, seconds: Mapping[str, float]) -> None:
        """Add a line about the steps since the last such line, if there are any."""
        if not self._count:
            return
        assert self._log is not None
        skipped = {"skipped": self._skipped} if self._skipped else {}
        steps = {"first": self._first, "step": self._step, "n": self._count}
        self._log.add("steps", seconds, _of_steps, **steps, **skipped, **self._waits)
        self._first, self._count, self._skipped, self._waits = self._step + 1, 0, 0, {}

    def _note_save(self, seconds: Mapping[str, float], step: int, **facts: Any) -> None:
        assert self._log is not None
        # Steps first, so that the lines are in the order in which their time was spent
        self._note_steps(seconds)
        self._log.add("save", seconds, lambda phase: phase == Phase.SAVE, step=step, **facts)
        self._saving = None
        self._log.sync()


def _of_steps(phase: str) -> bool:
    """Whether the time of a phase is added to the steps around it: other phases have separate lines."""
    return phase not in (Phase.EVALUATION, Phase.SAVE, Phase.GOING_BACK)


def _earlier(path: Path, step: int, began: float) -> tuple[float, float]:
    """Returns the productive seconds of earlier starts up to `step`, and when the first began; else `began`."""
    from forge_plugin_resilience.goodput.accounting import account_of
    from forge_plugin_resilience.goodput.events import read_events

    try:
        before = account_of(read_events(path), from_step=step)
    except OSError:  # the log warns about the same file
        return 0.0, began
    return before.classes["productive"], before.began or began


def _version() -> str:
    from importlib.metadata import version

    return version("forge-run")
