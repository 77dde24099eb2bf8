"""Jobs whose runs are watched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from forge_plugin_spikes import Spikes

sys.path.append(str(Path(__file__).parent))

from spiked_runs import STEPS


@pytest.fixture
def spikes():
    """A hook that judges from the ninth step on; its losses fall by half in this time, so the threshold is high."""
    return lambda **keys: Spikes(**{"window": 16, "warmup_steps": 0, "threshold": 12.0, "leave_out": 3, **keys})


@pytest.fixture
def spiked(make_job):
    """A job that saves every five steps, with the hook."""

    def make(hook, name="run", **changes):
        checkpoint = {"interval": 5, "interval_minutes": 0, **changes.pop("checkpoint", {})}
        return make_job(
            steps=changes.pop("steps", STEPS),
            checkpoint=checkpoint,
            job={"name": name},
            hooks={"spikes": hook} if hook else {},
            **changes,
        )

    return make
