"""The hook `profile`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import define, field
from attrs.validators import ge, gt

from forge_core.contracts.components import TrainingHook, WhenResumed
from forge_core.contracts.errors import Problem, listed, memory_words

if TYPE_CHECKING:
    from forge_core.contracts.contexts import StepContext, TrainContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_profile.memory import MemoryHistory
    from forge_plugin_profile.recording import Recording

NO_SNAPSHOT = "only GPUs have memory snapshots, and this run is on the CPU: there will be none"


@define(kw_only=True, slots=False)
class Profile(TrainingHook):
    """Records a window of steps by torch.profiler, and writes where their time goes.

    `profile/step-N/` in the run folder, N the first step of the window, receives a trace of each chosen rank,
    `rank-R.pt.trace.json.gz`, for Perfetto (ui.perfetto.dev) and HTA, and the summary `profile.md` and `profile.json`.
    Recording slows the steps of the window, and writing the trace keeps all ranks waiting once; losses and weights stay
    bitwise equal. Blocks are marked from outside the compiled code, and only within the window. A run that is stopped
    within the window has a profile of the steps until then; a run that fails within the window has none.
    """

    resumes_as: ClassVar[WhenResumed | None] = "safe"

    start: int = field(default=10, validator=ge(1))
    """First step of the window. The first few steps of a process compile, allocate and fill caches."""
    steps: int = field(default=3, validator=ge(1))
    """Steps of the window. A step of a large model has some 10^5 events, and 10 MB of trace."""
    warmup: int = field(default=1, validator=ge(0))
    """Steps before the window that are recorded and thrown away, as the profiler's own start-up distorts the first."""
    every: int = field(default=0, validator=ge(0))
    """Steps from one window to the next; 0: a single window."""
    ranks: tuple[int, ...] | Literal["first", "one_per_group", "all"] = "first"
    """Ranks that record: numbers; `first`: rank 0; `one_per_group`: the first rank of each pipeline stage; `all`."""
    shapes: bool = True
    """Record the shapes of operators' inputs, which their FLOPs follow from."""
    memory: bool = False
    """Record each allocation and release in the trace."""
    stacks: bool = False
    """Record Python's stacks, which makes the trace several times as large and the steps slower."""
    snapshot: bool = False
    """GPUs: keep a history of allocations, with stacks, from the beginning of the first window to the end of the run.
    `rank-R.memory.pickle` beside each trace, and under `profile/out-of-memory` if memory runs out, is for
    pytorch.org/memory_viz."""
    snapshot_entries: int = field(default=100_000, validator=gt(0))
    """Allocations and releases that the history keeps: the latest."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if self.start > job.train.steps:
            message = f"is step {self.start}, and train.steps is {job.train.steps}: it would never begin"
            yield Problem("start", message, fits=max(1, job.train.steps - self.steps + 1))
        if self.every and self.every < self.steps + self.warmup:
            least = f"at least steps + warmup = {self.steps + self.warmup}"
            yield Problem("every", f"is {self.every}: windows would overlap; take {least}, or 0 for one window")
        if self.snapshot and job.train.device == "cpu":
            yield Problem("snapshot", f'train.device is "cpu": {NO_SNAPSHOT}; remove it, or set memory = true')
        if sum(isinstance(hook, Profile) for hook in job.hooks.values()) > 1:
            yield Problem("", "a process has one profiler: remove the other profile, or set `every` for more windows")
        if not isinstance(self.ranks, str):
            yield from _rank_problems(self.ranks, layout.world_size)

    def on_train_begin(self, context: TrainContext) -> None:
        from forge_core.parallel.mesh import global_rank

        self._recording: Recording | None = None
        self._history: MemoryHistory | None = None
        assert context.build is not None
        self._records = global_rank() in chosen_ranks(self.ranks, context.build.layout)
        self._first = self._next_window(context.step)
        if self.snapshot and device_type(context) != "cuda" and global_rank() == 0:
            warnings.warn(f"hooks.profile: {NO_SNAPSHOT}", stacklevel=2)
        self._between_steps(context)

    def on_step_end(self, context: StepContext) -> None:
        self._between_steps(context)

    def on_train_end(self, context: TrainContext) -> None:
        if self._first and context.step >= self._first and context.folder is not None:  # it ended within the window
            self._finish(context, between_steps=True)
        self._close()

    def on_exception(self, context: TrainContext, error: BaseException) -> None:
        # Nothing here may wait for other ranks. The engine has put words to an error of memory, hence the text.
        if self._history is not None and (memory_words(error) or "memory ran out" in str(error)):
            self._history.write_at_end(context)
        self._close()

    def _next_window(self, step: int) -> int:
        """Returns the first step of the first window that is wholly to come after `step`; 0 if there is none."""
        if step < self.start:
            return self.start
        return self.start + self.every * (1 + (step - self.start) // self.every) if self.every else 0

    def _between_steps(self, context: TrainContext) -> None:
        """Begin, mark or end, after `context.step`. All ranks end a window together, those that do not record too."""
        if not self._first or context.folder is None:
            return
        if context.step == self._first + self.steps - 1:
            self._finish(context)
            self._first = self._next_window(context.step)
        elif self._recording is not None:
            self._recording.step()
        # This runs after `context.step`: a recording begins at the end of the step before its first one
        begins = max(self._first - self.warmup - 1, 0) <= context.step < self._first
        if begins and self._records and self._recording is None:
            self._begin(context)

    def _begin(self, context: TrainContext) -> None:
        from forge_plugin_profile.memory import MemoryHistory
        from forge_plugin_profile.recording import Recording

        # Once in a run: one history covers the first window and all later ones
        if self.snapshot and self._history is None and device_type(context) == "cuda":
            self._history = MemoryHistory(self.snapshot_entries)
        self._recording = Recording(self, context, self._first)

    def _finish(self, context: TrainContext, *, between_steps: bool = False) -> None:
        from forge_plugin_profile.recording import finish

        recording, self._recording = self._recording, None
        if recording is not None and not between_steps:
            recording.end_step()
        finish(context, self._first, recording, self._history)

    def _close(self) -> None:
        if self._recording is not None:  # of a run that ends before the window, or fails within it
            self._recording.stop()
        if self._history is not None:
            self._history.close()
        self._recording = self._history = None


def device_type(context: TrainContext) -> str:
    """Returns the type of the run's device, as `cuda`."""
    assert context.build is not None
    return context.build.device.type


def _rank_problems(ranks: Sequence[int], world_size: int) -> Iterator[Problem]:
    if not ranks:
        yield Problem("ranks", 'is empty: nothing would be recorded; take "first", or remove the hook')
    if outside := sorted({rank for rank in ranks if not 0 <= rank < world_size}):
        yield Problem("ranks", f"there is no rank {listed(outside)}: the job has {world_size}, from 0")
    if len(set(ranks)) < len(ranks):
        yield Problem("ranks", f"names a rank twice: {listed(ranks)}")


def chosen_ranks(ranks: Sequence[int] | str, layout: Layout) -> Sequence[int]:
    """Returns the numbers of the ranks that record, ascending."""
    if not isinstance(ranks, str):
        return sorted(ranks)
    if ranks == "first":
        return [0]
    if ranks == "all":
        return range(layout.world_size)
    # Ranks are numbered row by row, the outermost dimension first: of each dimension but a pipeline's, the first.
    numbers = [0]
    for dimension, size in layout.sizes:
        places = range(size) if dimension.layers else [0]
        numbers = [number * size + place for number in numbers for place in places]
    return numbers
