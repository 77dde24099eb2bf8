"""From what a step computed to lines in the loggers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from forge_core.auxiliary import Count
from forge_core.contracts.contexts import StepContext
from forge_core.contracts.runtime import Flushes, Logger
from forge_core.engine.build import Run
from forge_core.engine.step import Sums, metrics
from forge_core.metrics.flops import peak_flops
from forge_core.metrics.tracker import Clock, Tracker
from forge_core.parallel.mesh import global_rank


def open_loggers(run: Run, step: int, stack: ExitStack) -> dict[str, Logger]:
    """Start the loggers of the job on rank 0, by name; none on other ranks.

    Args:
        step: completed steps.
        stack: closes them.
    """
    loggers: dict[str, Logger] = {}
    for name, component in run.job.loggers.items() if global_rank() == 0 else ():
        name = f"loggers.{name} ({run.context.type_of(component)})"
        with _named(name):
            logger = run.context.build(component)
            logger.start(step)
        stack.callback(logger.close)
        loggers[name] = logger
    return loggers


@contextmanager
def _named(logger: str) -> Iterator[None]:
    """Add to an exception which logger raised it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {logger}")
        raise


class Recorder:
    """Makes the lines of a run, and hands each to every logger once its numbers are on the host."""

    def __init__(self, run: Run, loggers: Mapping[str, Logger], on_line: Callable[[Mapping[str, Any]], None]) -> None:
        """
        Args:
            loggers: by name, for errors; on rank 0 only.
            on_line: receives every training line, on every rank.
        """
        self._summaries = run.context.auxiliary.summaries
        train, ranks = run.job.train, run.context.layout.world_size
        self._tokens = train.global_batch_size * train.seq_len
        self._loggers = loggers
        self._on_line = on_line
        self._counts_interval = run.job.metrics.counts_interval
        self._tracker = Tracker(self._deliver)
        self._clock = Clock()
        flops, peak = run.outline.flops, peak_flops(run.job, run.context.device)
        self._mfu_per_speed = flops / peak / ranks if flops and peak else None
        self.last_loss: float | None = None
        self.last_evaluation: Mapping[str, float] = {}

    def step(
        self, context: StepContext, tokens: int, rate: float, waited: float, sums: Sums, skipped: Tensor | None
    ) -> None:
        """Queue a step's line. Its values from the device, and those that hooks logged, are the same on every rank.

        Args:
            tokens: positions fed since the run began.
            rate: learning rate of the first parameter group.
            waited: seconds that the step waited for data.
            sums: of the step, over all ranks.
            skipped: whether the update was skipped, (), where only the device knows.
        """
        assert context.grad_norm is not None
        scalars = metrics(sums)
        if not self._counts_interval or context.step % self._counts_interval:
            scalars = {name: value for name, value in scalars.items() if not isinstance(name, Count)}
        scalars.update(self._summaries())
        scalars["grad_norm"] = context.grad_norm
        if skipped is not None:
            scalars["skipped"] = skipped
        seconds, speed = self._clock.tick(self._tokens)
        record: dict[str, Any] = {"step": context.step, "lr": rate, "tokens": tokens, "tokens_per_second": speed}
        record |= {"step_seconds": seconds, "data_wait": min(waited / seconds, 1.0)}
        if self._mfu_per_speed:
            record["mfu"] = speed * self._mfu_per_speed
        if context.skipped:
            record["skipped"] = 1.0
        for name, value in context.logged.items():
            (scalars if isinstance(value, Tensor) else record)[name] = value
        self._tracker.put(record, scalars)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write an evaluation's line, after those of all steps before it."""
        self.flush()
        self.last_evaluation = metrics
        self._write({"step": step, **metrics})

    def flush(self) -> None:
        """Wait for the lines whose numbers are still being copied from the device."""
        self._tracker.flush()

    def sync(self) -> None:
        """Let loggers put the lines so far where they outlive the process and the machine."""
        for name, logger in self._loggers.items():
            if isinstance(logger, Flushes):
                with _named(name):
                    logger.flush()

    def restart_clock(self) -> None:
        """Leave a pause (evaluation, checkpoint) out of the speed."""
        self._clock.restart()

    def _deliver(self, record: dict[str, Any]) -> None:
        if not record.get("skipped"):
            record.pop("skipped", None)
        self.last_loss = record["loss"]
        self._on_line(record)
        self._write({"step": record.pop("step"), "loss": record.pop("loss"), **record})

    def _write(self, record: Mapping[str, Any]) -> None:
        for name, logger in self._loggers.items():
            try:
                with _named(name):
                    logger.log(record)
            except OSError as error:  # a full disk or a closed terminal ends no run
                warnings.warn(f"{name}: {error}", stacklevel=2)
