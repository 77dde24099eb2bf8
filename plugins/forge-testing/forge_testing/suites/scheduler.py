"""Contract of every schedule, as tests."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import ClassVar

from forge_core.contracts.components import SchedulerComponent
from forge_core.contracts.layout import Layout
from forge_core.contracts.optimizer import Schedule
from forge_core.job import Job
from forge_testing.suites.base import Suite, explained


class SchedulerSuite(Suite):
    """A pure function (step, total steps) -> finite Python number, for every length that the component accepts.

        class TestRex(SchedulerSuite):
            component = Rex()

    For the learning rate or any other scalar.
    """

    component: ClassVar[SchedulerComponent]
    total_steps: ClassVar[int] = 100
    """Length of a run that the component accepts. Shorter and longer ones are tested too, unless its `problems` refuse
    them."""

    def test_it_gives_a_finite_plain_number_for_every_step(self, tmp_path: Path) -> None:
        """From step 0 to the last one, for every length of a run, including one of a single step."""
        for total in self._totals(tmp_path):
            schedule = self._build(tmp_path, total)
            for step in range(total):
                with explained(f"schedule(step={step}, total={total}) fails"):
                    value = schedule(step, total)
                assert type(value) in (int, float), (
                    f"schedule(step={step}, total={total}) returns {value!r} of type {type(value).__name__}; return a "
                    "Python float, which can be written to metrics as it is"
                )
                assert math.isfinite(value), (
                    f"schedule(step={step}, total={total}) returns {value}, which is not finite"
                )
                json.dumps(value)

    def test_it_is_a_pure_function(self, tmp_path: Path) -> None:
        """The number of a step does not depend on earlier calls: a run that continues makes none for earlier steps."""
        steps = range(self.total_steps)
        schedule, again = self._build(tmp_path, self.total_steps), self._build(tmp_path, self.total_steps)
        forward = [schedule(step, self.total_steps) for step in steps]
        backward = [again(step, self.total_steps) for step in reversed(steps)][::-1]
        repeated = [schedule(step, self.total_steps) for step in steps]
        for step, values in enumerate(zip(forward, backward, repeated, strict=True)):
            assert len(set(values)) == 1, (
                f"step {step} of {self.total_steps} returns {sorted(set(values))}, depending on earlier calls; "
                "compute it from step and total alone, and keep nothing from call to call"
            )

    def test_one_schedule_serves_runs_of_other_lengths(self, tmp_path: Path) -> None:
        """The length is an argument: a call with a longer run does not change the values of a shorter one."""
        schedule = self._build(tmp_path, self.total_steps)
        before = [schedule(step, self.total_steps) for step in range(self.total_steps)]
        longer = 2 * self.total_steps
        for step in range(longer):
            with explained(f"schedule(step={step}, total={longer}) fails"):
                schedule(step, longer)
        after = [schedule(step, self.total_steps) for step in range(self.total_steps)]
        assert after == before, (
            f"asking for a run of {longer} steps changed the values of one of {self.total_steps} steps"
        )

    def test_a_job_refuses_no_run_of_the_stated_length(self, tmp_path: Path) -> None:
        """The component accepts the suite's `total_steps`."""
        problems = self._problems(tmp_path, self.total_steps)
        assert not problems, (
            f"a run of total_steps = {self.total_steps} is refused: {'; '.join(problems)}; give the suite another "
            "`total_steps`, or fix `problems`"
        )

    def _totals(self, folder: Path) -> list[int]:
        lengths = (1, 2, 3, 10, self.total_steps, 10 * self.total_steps + 7)
        return [total for total in lengths if not self._problems(folder, total)]

    def _job(self, folder: Path, total: int) -> Job:
        return self.tiny_job(folder, scheduler=self.make(folder), steps=total)

    def _problems(self, folder: Path, total: int) -> list[str]:
        job = self._job(folder, total)
        return [str(problem) for problem in job.scheduler.problems(job, Layout())]

    def _build(self, folder: Path, total: int) -> Schedule:
        job = self._job(folder, total)
        return self.context(job).build(job.scheduler)
