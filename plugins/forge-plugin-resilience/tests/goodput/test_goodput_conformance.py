"""The hooks keep the contracts of their kind."""

from __future__ import annotations

from attrs import evolve

from forge_plugin_resilience.goodput import Disk, Goodput, Interval
from forge_testing.suites import HookSuite


class TestGoodput(HookSuite):
    component = Goodput()


class TestDisk(HookSuite):
    component = Disk()


class TestInterval(HookSuite):
    component = Interval(first_minutes=1e-9, longest_minutes=1e-9)
    needs_cpu = "a checkpoint is copied to the host, as often as the clock says"

    def _job(self, folder, hook, name, **changes):
        job = super()._job(folder, hook, name, **changes)
        checkpoint = evolve(job.checkpoint, interval=0, interval_minutes=0)
        return evolve(job, checkpoint=checkpoint, hooks={"goodput": Goodput(), **job.hooks})
