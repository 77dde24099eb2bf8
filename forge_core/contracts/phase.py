"""`Phase`: what a rank is doing, for its watchdog, its progress, its metrics and every account of its time."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Part of a run in which each moment of a rank is."""

    IMPORTS = "importing torch"
    """From the begin of the process on."""
    START = "start-up"
    GROUPS = "starting the process groups"
    SEARCH = "looking for a checkpoint"
    READING = "reading data"
    BUILDING = "building the model"
    LOADING = "loading the checkpoint"
    DRY_RUN = "dry run"
    DATA = "data"
    FORWARD_BACKWARD = "forward and backward"
    """With the waits for other ranks in it."""
    OPTIMIZER = "optimizer"
    AGREEMENT = "agreement of the ranks"
    EVALUATION = "evaluation"
    SAVE = "save"
    GOING_BACK = "going back"
    """To an earlier state."""
    HOOK = "hook"
    """Seconds are kept for each hook: see `of`."""
    END = "end"

    @classmethod
    def of(cls, name: str) -> Phase:
        """The phase of a name in `TrainContext.seconds`, where each hook has its own, such as `hook hooks.ema`."""
        return cls.HOOK if name.startswith(f"{cls.HOOK} ") else cls(name)


COMPUTING = (Phase.FORWARD_BACKWARD, Phase.OPTIMIZER, Phase.AGREEMENT)
"""Phases of every step that only compute, or wait for other ranks. `DATA` reads."""
