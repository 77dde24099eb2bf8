"""Saving, finding and deleting whole checkpoints: when a run saves, and what happens when a save fails.

A checkpoint is one folder for all ranks: files of tensors with an index, and the manifest (`storage`). The folder
appears under its name only when all of it is on disk.
"""

from __future__ import annotations

import json
import math
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from attrs import evolve, field, frozen

from forge_core.checkpoint.ranks import Ranks
from forge_core.checkpoint.storage import FORMAT, How, find_faults, read_manifest, to_json, write_manifest
from forge_core.checkpoint.tensors import Staging, TensorWriter, base_folder
from forge_core.contracts.errors import CheckpointError
from forge_core.contracts.runtime import SpreadStorage, State, Storage
from forge_core.files import existing_part
from forge_core.job import CheckpointSection, Retention
from forge_core.parallel.mesh import gather_objects, group_timeout

T = TypeVar("T")
ADVICE = "Once the problem is fixed, the same command continues from the newest checkpoint"


@frozen
class Checkpoints:
    """The checkpoints of one run, saved and loaded by all `ranks` together; `how` sets how `newest` verifies them."""

    storage: Storage
    retention: Retention
    how: How
    ranks: Ranks = field(factory=Ranks)
    writer: TensorWriter = field(factory=TensorWriter)

    def save(self, step: int, state: State, staged: Staging | None = None) -> Path:
        """Write the checkpoint of `step`, then delete those that retention does not keep. Collective.

        With `staged`, a copy of the state's tensors, its values are the ones to write. Raises a `CheckpointError` if
        some rank could not write: nothing of it is left, and earlier checkpoints are untouched.
        """
        try:
            # The manifest is written last and the folder renamed after that: a save that dies leaves nothing
            # under the name of a checkpoint
            folder = self._call(lambda: self.storage.begin(step))
            files = self.writer.write(folder, state.tensors, staged, self.ranks)
            if isinstance(storage := self.storage, SpreadStorage):
                self.ranks.on_each(lambda: storage.publish(step))
            manifest = {"format": FORMAT, "step": step, "time": time.time(), "files": files, **state.values}
            self.ranks.on_rank0(lambda: write_manifest(folder, manifest))
            self._call(lambda: self.storage.commit(step))
        except CheckpointError as error:
            raise self.failure(step, error) from error
        self.tidy(step)  # after the commit: until then the older ones are all that a crash would leave
        return self.storage.path(step)

    def _call(self, action: Callable[[], T]) -> T:
        """Call `action` on rank 0, or on each rank of a `SpreadStorage`. Collective."""
        return (self.ranks.on_each if isinstance(self.storage, SpreadStorage) else self.ranks.on_rank0)(action)

    def failure(self, step: int, cause: CheckpointError) -> CheckpointError:
        """The error to raise when `step` could not be saved; removes its unfinished files. Collective."""
        self._call(lambda: self.storage.discard(step))
        return CheckpointError(self.ranks.on_rank0(lambda: self._describe_failure(step, str(cause))))

    def steps(self) -> list[int]:
        """Steps that have a committed checkpoint. Collective."""
        if isinstance(self.storage, SpreadStorage):
            self.storage.join(lambda value: gather_objects(value, self.ranks.group))
        # Rank 0 lists the steps for all: a network file system may show the ranks different folders
        return list(self.ranks.on_rank0(self.storage.steps))

    def close(self) -> None:
        """The run ends well: wait until the storage has all. Collective."""
        if isinstance(storage := self.storage, SpreadStorage):
            self.ranks.on_each(storage.close)

    def newest(self, limit: int | None = None) -> tuple[Path, dict[str, Any]] | None:
        """The newest intact checkpoint, of at most `limit` steps: its folder and manifest. Collective.

        Damaged ones are named in a warning and passed over. Raises a `CheckpointError` if none of several is intact.
        """
        faults = []
        for step in reversed(self.steps()):
            if limit is not None and step > limit:
                continue
            path = self.storage.path(step)
            try:
                return path, verify(path, self.how, self.ranks)
            except CheckpointError as error:
                faults.append(str(error))
                self.warn(f"passing over a damaged checkpoint: {error}")
        if faults:  # not None: a run that silently started over would bury checkpoints that a repair may recover
            raise CheckpointError("no checkpoint is intact: " + "; ".join(faults))
        return None

    def to_prune(self) -> list[int]:
        """The steps whose checkpoints retention does not keep."""
        steps = self.storage.steps()
        return self.retention.to_delete(steps, self._metrics(steps))

    def tidy(self, intact: int) -> None:
        """Delete what dead saves have left, and what retention does not keep, but for the step `intact`. Collective."""
        try:
            self._call(self.storage.clear)
            for step in self.ranks.on_rank0(self.to_prune):
                # A newer one may be damaged in a way that sizes do not show: `keep = 1` would leave nothing else
                if step != intact:
                    self._call(partial(self.storage.delete, step))
        except CheckpointError as error:  # no failed save: the checkpoint itself is committed by now
            self.warn(f"could not delete an old checkpoint: {error}")

    def _describe_failure(self, step: int, fault: str) -> str:
        folder = self.storage.path(step).parent
        steps = self.storage.steps()
        listed = ", ".join(map(str, steps if len(steps) < 8 else [*steps[:3], "…", *steps[-3:]]))
        left = f"checkpoints of steps {listed} are untouched" if steps else "there is no earlier one"
        # For a cache of checkpoints that are stored elsewhere, the free space would be meaningless
        is_cache = isinstance(self.storage, SpreadStorage)
        free = "" if is_cache else f"; {shutil.disk_usage(existing_part(folder)).free / 1e9:.1f} GB free there"
        return f"could not save step {step} in {folder}: {fault}{free}; {left}"

    def _metrics(self, steps: Sequence[int]) -> dict[int, float]:
        """Step -> the metric of the last evaluation before it."""
        metrics: dict[int, float] = {}
        evaluations = set()
        for step in steps if self.retention.keep_best else ():
            with suppress(CheckpointError):  # a damaged one has no metric
                evaluation = read_manifest(self.storage.path(step)).get("evaluation", {})
                value = evaluation.get("metrics", {}).get(self.retention.best_metric)
                # An evaluation counts for the first checkpoint after it only: the best are of different evaluations
                if value is not None and evaluation["step"] not in evaluations:
                    evaluations.add(evaluation["step"])
                    metrics[step] = value
        return metrics

    def warn(self, message: str) -> None:
        """Warn on rank 0."""
        if self.ranks.rank == 0:
            warnings.warn(message, stacklevel=3)


def verify(folder: Path, how: How, ranks: Ranks | None = None) -> dict[str, Any]:
    """Check the files of a checkpoint, and of its base, against its manifest, which is returned.

    Collective: each rank checks its share of the files, and all raise the same `CheckpointError`, naming each fault.
    """
    ranks = ranks or Ranks()
    manifest = ranks.on_rank0(lambda: read_manifest(folder))
    # The largest first, so that every rank has about as much to read
    names = sorted(manifest["files"], key=lambda name: -manifest["files"][name]["size"])
    mine = find_faults(folder, manifest, names[ranks.rank :: ranks.world_size], how)
    faults = [fault for of_rank in gather_objects(mine, ranks.group) for fault in of_rank]
    if faults:
        raise CheckpointError("; ".join(faults))
    if base := manifest.get("base"):
        verify(ranks.on_rank0(lambda: base_folder(folder, base)), how, ranks)
    return manifest


# --- saves of a run ----------------------------------------------------------------------------------------------


class Saver:
    """Saves the states of a run. All its methods but `due` and `overdue` are collective.

    `saved_step` was saved last, or is being written; None if there is none, or saving it failed. `evaluation` is the
    last one, which checkpoints record: `step` and `metrics`; empty before the first.
    """

    def __init__(
        self,
        section: CheckpointSection,
        checkpoints: Checkpoints,
        before: Callable[[], None],
        on_saved: Callable[[int, Path], None],
    ) -> None:
        """Start a thread and a process group for it if `[checkpoint]` has `async_save`. Collective then.

        `before` is called on rank 0 when a state is taken, and an error in it is a failed save; `on_saved` is called on
        every rank, in the main thread, once a checkpoint is there.
        """
        self._section = section
        self._checkpoints = checkpoints
        self._before = before
        self._on_saved = on_saved
        self._pending: tuple[int, Future[Path]] | None = None
        """The step that a background thread is writing."""
        self.evaluation: dict[str, Any] = {}
        self.ended = ""
        """Why the run has ended for good, for its last checkpoint."""
        self.saved_step: int | None = None
        self._saved_at = time.monotonic()
        if section.async_save:
            # One thread for the whole run, where DCP's `async_save` starts one for each save
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._staging = Staging()
            # A separate process group: messages of a save must not mix with messages of the steps that run meanwhile
            self._checkpoints = evolve(
                checkpoints, ranks=Ranks(dist.new_group(backend="gloo", timeout=group_timeout()))
            )

    def continues(self, manifest: Mapping[str, Any]) -> None:
        """Note that the run continues from a checkpoint."""
        self.saved_step, self.evaluation = manifest["step"], manifest["evaluation"]
        self.ended = manifest.get("ended", "")

    def note_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record this evaluation in all checkpoints from now on."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self.evaluation = {"step": step, "metrics": finite}
        if not_finite := [name for name in metrics if name not in finite]:
            self.evaluation["not_finite"] = not_finite
        if self._section.keep_best and self._section.best_metric not in metrics:
            best = self._section.best_metric
            self._checkpoints.warn(f"checkpoint.best_metric = {best!r} is none of {', '.join(metrics)}")

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due at this step number."""
        interval = self._section.interval
        return bool(interval and step % interval == 0) or self._checkpoints.retention.is_early(step)

    @property
    def overdue(self) -> bool:
        """Whether a checkpoint is due by this rank's clock; other ranks may not have reached that time yet."""
        return time.monotonic() - self._saved_at >= (60 * self._section.interval_minutes or math.inf)

    def save(self, step: int, state: State, final: bool = False) -> None:
        """Save the state of `step`, or with `async_save` copy it and start to write it.

        The last save of a run is `final`: it is waited for, and must succeed. Raises a `CheckpointError` if this
        save or the previous one failed, and `on_failure` does not tolerate it.
        """
        self._saved_at = time.monotonic()  # also if it fails: the next one is not tried at once
        self.settle()  # one at a time: the copy in host memory is reused, and checkpoints appear in the order of steps
        try:
            state = State(state.tensors, self._plain_values(step, state))
            if self._section.async_save and not final:
                staged = self._staging.copy(state.tensors)  # now, since the next step changes the tensors in place
                self._pending = step, self._thread.submit(self._checkpoints.save, step, state, staged)
            else:
                self._checkpoints.save(step, state)
        except CheckpointError as error:
            self._failed(error, final)
            return
        self.saved_step = step
        if self._pending is None:
            self._on_saved(step, self._checkpoints.storage.path(step))

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing in the background; `settle` may be called once no rank is."""
        return self._pending is not None and not self._pending[1].done()

    def settle(self) -> None:
        """Wait for a save in the background, and report how it went; raises as `save`."""
        if self._pending is None:
            return
        (step, written), self._pending = self._pending, None
        try:
            path = written.result()
        except CheckpointError as error:
            self._failed(error)
        else:
            self._on_saved(step, path)  # here and not in the thread: hooks must run in the main thread

    def abandon(self, error: BaseException) -> None:
        """The run fails with `error`: wait for the background save, which may be good, and note if it failed too."""
        try:
            self.settle()
        except Exception as other:
            error.add_note(f"In addition: {other}")
        if self._section.async_save:
            self._thread.shutdown()  # its group stays: to destroy it, ranks would wait for those that have failed

    def close(self) -> None:
        """The run ends well. Every save was waited for."""
        self._checkpoints.close()
        if self._section.async_save:
            self._thread.shutdown()
            dist.destroy_process_group(self._checkpoints.ranks.group)

    def _plain_values(self, step: int, state: State) -> dict[str, Any]:
        """A copy of everything except the tensors: training continues and changes the originals."""

        def take() -> str:
            # Metrics go to the disk first: a run that continues from this checkpoint does not make these lines again
            self._before()
            ended = {"ended": self.ended} if self.ended else {}
            return to_json({"evaluation": self.evaluation, **ended, **state.values})

        try:
            return json.loads(self._checkpoints.ranks.on_rank0(take))
        except CheckpointError as error:
            raise self._checkpoints.failure(step, error) from error

    def _failed(self, error: CheckpointError, final: bool = False) -> None:
        self.saved_step = None
        if final or self._section.on_failure == "stop":
            raise CheckpointError(f"{error}. {ADVICE}") from error
        self._checkpoints.warn(f"{error}. Training continues, and the next save tries again")
