"""When a run saves, whether training waits for it, and what happens when a save fails."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist

from forge_core.checkpoint.manager import Checkpoints, State
from forge_core.checkpoint.ranks import Ranks
from forge_core.checkpoint.storage import to_json
from forge_core.checkpoint.tensor_writer import Staging
from forge_core.contracts.errors import CheckpointError
from forge_core.job import CheckpointSection
from forge_core.parallel.mesh import group_timeout

ADVICE = "Once that is mended, the same command continues from the newest checkpoint"


class Saver:
    """Saves the states of a run. All its methods but `due` are collective.

    Attributes:
        saved_step: the step that was saved last, or is being written; None if there is none, or saving it failed.
        evaluation: the last one, which checkpoints record: `step` and `metrics`; empty before the first.
    """

    def __init__(
        self,
        section: CheckpointSection,
        checkpoints: Checkpoints,
        before: Callable[[], None],
        on_saved: Callable[[int, Path], None],
    ) -> None:
        """Start a thread and a process group for it if `[checkpoint]` has `async_save`. Collective then.

        Args:
            section: `[checkpoint]` of the job.
            checkpoints: where to save.
            before: called on rank 0 when a state is taken; an error in it is a failed save.
            on_saved: called on every rank, in the main thread, once a checkpoint is there.
        """
        self._section = section
        self._checkpoints = checkpoints
        self._before = before
        self._on_saved = on_saved
        self._pending: tuple[int, Future[Path]] | None = None
        """The step that a background thread is writing."""
        self.evaluation: Mapping[str, Any] = {}
        self.saved_step: int | None = None
        if section.async_save:
            self._start_background()

    def continues(self, manifest: Mapping[str, Any]) -> None:
        """Note that the run continues from a checkpoint."""
        self.saved_step, self.evaluation = manifest["step"], manifest["evaluation"]

    def note_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record this evaluation in all checkpoints from now on."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self.evaluation = {"step": step, "metrics": finite}
        if self._section.keep_best and self._section.best_metric not in metrics and self._checkpoints.ranks.rank == 0:
            known = ", ".join(metrics)
            warnings.warn(f"checkpoint.best_metric = {self._section.best_metric!r} is none of {known}", stacklevel=3)

    def due(self, step: int) -> bool:
        """Whether the number of a step asks for a checkpoint."""
        interval = self._section.interval
        return bool(interval and step % interval == 0) or self._checkpoints.retention.is_early(step)

    def save(self, step: int, state: State, final: bool = False) -> None:
        """Save the state of `step`, or with `async_save` copy it and start to write it.

        The last save of a run is `final`: it is waited for, and must succeed.

        Raises:
            CheckpointError: a save failed, this or the one before, and `on_failure` does not let it pass.
        """
        self.settle()  # one at a time: the copy in host memory is reused, and checkpoints appear in the order of steps
        try:
            path = self._write(step, state, background=self._section.async_save and not final)
        except CheckpointError as error:
            self._failed(error, final)
        else:
            self.saved_step = step
            if path is not None:
                self._on_saved(step, path)

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing in the background; `settle` may be called once no rank is."""
        return self._pending is not None and not self._pending[1].done()

    def settle(self) -> None:
        """Wait for a save in the background, and report how it went.

        Raises:
            CheckpointError: it failed, and `on_failure` does not let that pass.
        """
        if self._pending is None:
            return
        (step, written), self._pending = self._pending, None
        try:
            path = written.result()
        except CheckpointError as error:
            self._failed(error)
        else:
            self._on_saved(step, path)  # here and not in the thread: hooks must run in the main thread

    def tidy(self) -> None:
        """Delete the checkpoints that the job does not want kept."""
        if self.saved_step is not None:
            self._checkpoints.tidy(self.saved_step)

    def abandon(self, error: BaseException) -> None:
        """The run fails with `error`: wait for the background save, which may be good, and note if it failed too."""
        try:
            self.settle()
        except Exception as other:
            error.add_note(f"Besides: {other}")
        if self._section.async_save:
            self._thread.shutdown()  # its group stays: to destroy it, ranks would wait for those that have failed

    def close(self) -> None:
        """The run ends well. Every save was waited for."""
        if self._section.async_save:
            self._thread.shutdown()
            dist.destroy_process_group(self._checkpoints.ranks.group)

    def _start_background(self) -> None:
        # One thread for the whole run, where DCP's `async_save` starts one for each save
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._staging = Staging()
        # A process group of its own: messages of a save must not mix with those of the steps that go on meanwhile
        group = dist.new_group(backend="gloo", timeout=group_timeout())
        self._checkpoints = attrs.evolve(self._checkpoints, ranks=Ranks(group))

    def _write(self, step: int, state: State, background: bool) -> Path | None:
        """Returns the checkpoint, unless it is written in the background."""
        state = State(state.tensors, self._plain_values(step, state))
        if not background:
            return self._checkpoints.save(step, state)
        staged = self._staging.copy(state.tensors)  # before returning: the next step changes the tensors in place
        self._pending = step, self._thread.submit(self._checkpoints.save, step, state, staged)
        return None

    def _plain_values(self, step: int, state: State) -> dict[str, Any]:
        """All but the tensors, as a copy: training goes on and changes the originals."""

        def take() -> str:
            # Metrics go to the disk first: a run that continues from this checkpoint does not make these lines again
            self._before()
            return to_json({"evaluation": self.evaluation, **state.values})

        try:
            return json.loads(self._checkpoints.ranks.on_rank0(take))
        except CheckpointError as error:
            raise self._checkpoints.failure(step, error) from error

    def _failed(self, error: CheckpointError, final: bool = False) -> None:
        self.saved_step = None
        if final or self._section.on_failure == "stop":
            raise CheckpointError(f"{error}. {ADVICE}") from error
        if self._checkpoints.ranks.rank == 0:
            warnings.warn(f"{error}. Training goes on, and the next save tries again", stacklevel=4)
