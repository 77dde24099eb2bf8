"""From what a step computed to lines in the loggers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from forge_core.auxiliary import Count
from forge_core.contracts.contexts import StepContext
from forge_core.contracts.runtime import Logger
from forge_core.engine.build import Run
from forge_core.metrics.flops import peak_flops
from forge_core.metrics.tracker import Clock, Tracker


class Recorder:
    """Makes the lines of a run, and hands each to every logger once its numbers are on the host."""

    def __init__(self, run: Run, loggers: Sequence[Logger], on_line: Callable[[Mapping[str, Any]], None]) -> None:
        """`on_line` sees every training line, on every rank; loggers are on rank 0 only."""
        train, ranks = run.job.train, run.context.layout.world_size
        self._tokens = train.global_batch_size * train.seq_len
        self._loggers = loggers
        self._on_line = on_line
        self._tracker = Tracker(self._deliver)
        self._clock = Clock()
        flops, peak = run.outline.flops, peak_flops(run.job, run.context.device)
        self._mfu_per_speed = flops / peak / ranks if flops and peak else None
        self.last_loss: float | None = None
        self.last_evaluation: Mapping[str, float] = {}

    def step(
        self, context: StepContext, tokens: int, rate: float, waited: float, scalars: dict[str | Count, Tensor]
    ) -> None:
        """Queue a step's line; `scalars` are on the device and the same on every rank, as is what hooks logged.
        `waited`: seconds that the step waited for data."""
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
        """Wait for the lines that are still on their way."""
        self._tracker.flush()

    def sync(self) -> None:
        """See that loggers put the lines so far where they outlive the process and the machine."""
        for logger in self._loggers:
            if hasattr(logger, "flush"):
                logger.flush()

    def restart_clock(self) -> None:
        """After a pause (evaluation, checkpoint): it is not part of the speed."""
        self._clock.restart()

    def _deliver(self, record: dict[str, Any]) -> None:
        if not record.get("skipped"):
            record.pop("skipped", None)
        self.last_loss = record["loss"]
        self._on_line(record)
        self._write({"step": record.pop("step"), "loss": record.pop("loss"), **record})

    def _write(self, record: Mapping[str, Any]) -> None:
        """A full disk or a closed terminal ends no run."""
        for logger in self._loggers:
            try:
                logger.log(record)
            except OSError as error:
                warnings.warn(f"{type(logger).__name__}: {error}", stacklevel=2)
