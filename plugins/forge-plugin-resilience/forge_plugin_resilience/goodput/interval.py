"""The hook `interval`."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attrs import define, field
from attrs.validators import gt

from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import JobError, Problem
from forge_core.contracts.phase import Phase

if TYPE_CHECKING:
    import attrs

    from forge_core.contracts.contexts import StepContext, TrainContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_resilience.goodput.accounting import Account

MEASURED = 5
"""Saves whose median is the duration of a save."""
NEWS = 0.2
"""Relative change of the interval that is worth a line."""


def auto_or_share(_: Any, attribute: attrs.Attribute[Any], value: float | str) -> None:
    """A validator: "auto", or a number between 0 and 1."""
    if isinstance(value, float | int) and not 0 < value < 1:
        raise ValueError(f"'{attribute.name}' must be 'auto', or a share of the time between 0 and 1: {value}")


@define(kw_only=True, slots=False)
class Interval(TrainingHook):
    """Chooses when to save, by what a save costs and how often the run fails, and prints the interval.

    Training time between two saves is sqrt(2 d (M + R)) (Young 1974, Daly 2006): d is the median of the last five times
    that a save kept training waiting, R the median time of a restart, M the expected time between failures. The latter
    two are from `events.jsonl`, so the job needs `[hooks.goodput]`.
    """

    resumes_as = "safe"
    clock: ClassVar = staticmethod(time.monotonic)

    overhead: Literal["auto"] | float = field(default="auto", validator=auto_or_share)
    """"auto": as above. A number: saves take this share of the time, whatever fails (CheckFreq, Mohan et al. 2021)."""
    gpu_years: float = field(default=5.8, validator=gt(0))
    """Years of one rank between failures, until the run has had failures itself. The default is Llama 3's rate."""
    first_minutes: float = field(default=5.0, validator=gt(0))
    """Minutes until the first save of a run, which measures what one costs."""
    longest_minutes: float = field(default=60.0, validator=gt(0))
    """Upper bound, unless a save takes longer than a tenth of it: ten times the duration of a save is the lower one."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Requires the hook `goodput`, whose file has the failures, and refuses keys that save by another rule."""
        from forge_plugin_resilience.goodput.goodput import Goodput

        if not any(isinstance(hook, Goodput) for hook in job.hooks.values()):
            yield Problem("", "failures and restarts are read from events.jsonl: add [hooks.goodput]")
        yield from self._other_clocks(job)

    def _other_clocks(self, job: Job) -> Iterable[Problem]:
        own, checkpoint = "this hook chooses when to save", job.checkpoint
        if checkpoint.interval_minutes:
            message = f"is {checkpoint.interval_minutes:g}, and {own}: set checkpoint.interval_minutes = 0"
            yield Problem("", f"checkpoint.interval_minutes {message}")
        if checkpoint.interval and not (checkpoint.keep_every and checkpoint.interval % checkpoint.keep_every == 0):
            hint = "set checkpoint.interval = 0, or to checkpoint.keep_every if those checkpoints are to stay"
            yield Problem("", f"checkpoint.interval is {checkpoint.interval}, and {own}: {hint}")

    def on_train_begin(self, context: TrainContext) -> None:
        """Check the keys of `[checkpoint]` again, and start the clock of the first save."""
        from forge_core.parallel.mesh import global_rank, world_size

        if problems := list(self._other_clocks(context.job)):  # hooks that come from Python have not been checked
            raise JobError(problems)
        self._ranks = world_size()
        self._decides = global_rank() == 0 and context.folder is not None  # one rank is enough to ask
        self._durations: deque[float] = deque(maxlen=MEASURED)
        self._began = self._saved_at = self.clock()
        self._blocked = context.seconds.get(Phase.SAVE, 0.0) if self._decides else 0.0
        self._begun = False
        self._history: Account | None = None
        self._seconds, self._told = 60 * self.first_minutes, 0.0

    def on_checkpoint_begin(self, context: TrainContext) -> None:
        """Note that a save has begun; what it cost is known at the next step."""
        self._begun = True

    def on_step_begin(self, context: StepContext) -> None:
        """Read the history once; after a save, take the time that it kept training waiting, and choose again."""
        if not self._decides:
            return
        if self._history is None:
            self._read(context)
        blocked = context.seconds.get(Phase.SAVE, 0.0)
        if self._begun:  # after the last step
            # The engine only has the sum over all saves
            self._durations.append(blocked - self._blocked)
            self._saved_at, self._blocked, self._begun = self.clock(), blocked, False
            self._choose()

    def on_step_end(self, context: StepContext) -> None:
        """Request a save from rank 0 once the interval is over; the engine makes it one of all ranks."""
        if self._decides:
            if self.clock() - self._saved_at >= self._seconds:
                context.request_checkpoint()
            context.log("checkpoint_interval_s", self._seconds)

    def _read(self, context: TrainContext) -> None:
        """Read the history of the run, after every hook has begun: the last start in it is then this one."""
        from forge_plugin_resilience.goodput.accounting import account_of
        from forge_plugin_resilience.goodput.events import EVENTS, read_events

        assert context.folder is not None
        # With `now`, as this run continues: its steps since the last save are not lost
        self._history = account_of(read_events(context.folder / EVENTS), now=0.0)
        if not self._history.attempts:
            warnings.warn(f"hooks.interval: {EVENTS} has no start of this run: failures do not count", stacklevel=2)
        self._durations.extend(save.blocked_s for save in self._history.saves[-MEASURED:])
        self._choose()

    def _choose(self) -> None:
        """Choose the interval, and print it if it has changed."""
        if not self._durations:
            return
        from forge_plugin_resilience.goodput.failure_rate import best_interval, expected_mtbf
        from forge_plugin_resilience.goodput.words import duration

        assert self._history is not None
        blocked, account = median(self._durations), self._history
        # The history was read once; this start's time since then is added
        running = account.exposure + self.clock() - self._began
        mtbf = expected_mtbf(running, account.failures, self._ranks, self.gpu_years)
        longest = 60 * self.longest_minutes
        if self.overhead == "auto":
            self._seconds = best_interval(blocked, mtbf, account.restart_s, longest)
            why = f"failures are expected every {duration(mtbf)}, and a restart takes {duration(account.restart_s)}"
        else:
            # Within the bounds of `best_interval`
            self._seconds = max(10 * blocked, min(longest, blocked / float(self.overhead)))
            why = f"saves shall take {100 * float(self.overhead):g} % of the time"
        if abs(self._seconds - self._told) > NEWS * self._told:
            text = f"a checkpoint every {duration(self._seconds)}: a save keeps training waiting for"
            print(f"{text} {duration(blocked)}, {why}", flush=True)
            self._told = self._seconds
