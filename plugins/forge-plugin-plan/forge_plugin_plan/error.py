"""The bound of a plan beside the step that a run has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import frozen

from forge_plugin_plan.bounds import bounds
from forge_plugin_plan.estimate import Plan
from forge_plugin_plan.machine import Machine
from forge_plugin_plan.measurements import Measurements, fingerprint


@frozen(kw_only=True)
class Error:
    """How far the bound on the time of a step is from a measured one."""

    file: str
    device: str
    measured: float | None = None
    """Seconds of a step of the same job; None: there is none."""
    steps: int = 0
    """Number of steps that were timed."""
    predicted: float | None = None
    """Seconds that a step takes at least, if all overlaps."""
    error: float | None = None
    """(predicted - measured) / measured."""
    why: str = ""
    """Why the two cannot be compared, if so."""

    @property
    def side(self) -> str:
        """On which side of the measured step the bound is."""
        return "less" if (self.error or 0) < 0 else "more: no bound, as kernels of the probes are slower than the job's"

    @classmethod
    def of(cls, plan: Plan, machine: Machine, found: Measurements, file: Path) -> Error:
        """Returns the error of a plan, where the measured job is the planned one."""
        about: dict[str, Any] = {"file": str(file), "device": found.device}
        if found.step is None:
            return cls(**about, why="the run has timed none")
        if found.step.job != fingerprint(plan.job, plan.layout):
            return cls(**about, why="model, batch, precision, stages or optimizer are not those of the planned job")
        # Ranks wait for the slowest, so its bound is the step's
        played = [rank for rank in plan.ranks if rank.traffic is not None]
        if not played:
            return cls(**about, why="the step cannot be played")
        predicted = max(bound.seconds for rank in played for bound in bounds(rank, machine))
        measured = found.step.seconds
        error = predicted / measured - 1
        return cls(**about, measured=measured, steps=found.step.steps, predicted=predicted, error=error)
