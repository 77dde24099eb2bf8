"""Saving, finding and deleting whole checkpoints.

A checkpoint is one folder for all ranks: files of tensors with an index, and the manifest (`storage`). The folder
appears under its name only when all of it is on disk.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen
from torch import Tensor

from forge_core.checkpoint.ranks import Ranks
from forge_core.checkpoint.storage import FORMAT, How, find_faults, read_manifest, write_manifest
from forge_core.checkpoint.tensor_writer import Staging, TensorWriter
from forge_core.contracts.errors import CheckpointError
from forge_core.contracts.runtime import Storage
from forge_core.parallel.mesh import gather_objects


@frozen
class State:
    """Contents of a checkpoint: tensors by name, and plain types."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


@frozen(kw_only=True)
class Retention:
    """The checkpoints to keep; see the keys of `[checkpoint]`. A checkpoint stays if any of these names it."""

    keep: int = 0
    keep_every: int = 0
    keep_best: int = 0
    best_metric: str = "eval/loss"
    early_steps: int = 0
    at_start: bool = False

    def to_delete(self, steps: Sequence[int], metrics: Mapping[int, float]) -> list[int]:
        """The steps whose checkpoints nothing asks to keep, ascending.

        Args:
            steps: those that have a checkpoint.
            metrics: step -> value of the metric, lower is better; steps without one are never the best.
        """
        staying = {step for step in steps if self.keeps_forever(step)}
        staying |= set(sorted(steps)[-self.keep :])  # all of them if `keep` is 0
        best = sorted((metrics[step], step) for step in steps if step in metrics)
        staying |= {step for _, step in best[: self.keep_best]}
        return sorted(set(steps) - staying)

    def keeps_forever(self, step: int) -> bool:
        """Whether a checkpoint of this step is never deleted, whatever comes later."""
        every = bool(self.keep_every) and step > 0 and step % self.keep_every == 0
        return every or self.is_early(step) or (self.at_start and step == 0)

    def is_early(self, step: int) -> bool:
        """Whether the step is in the dense window at the start: a power of two."""
        return 0 < step <= self.early_steps and step & (step - 1) == 0


@frozen
class Checkpoints:
    """The checkpoints of one run."""

    storage: Storage
    retention: Retention
    how: How
    """How thoroughly `newest` verifies."""
    ranks: Ranks = field(factory=Ranks)
    """All ranks of the run, which save and load together."""
    writer: TensorWriter = field(factory=TensorWriter)

    def save(self, step: int, state: State, staged: Staging | None = None) -> Path:
        """Write the checkpoint of `step`, then delete those that retention does not keep. Collective.

        With `staged`, a copy of the state's tensors, its values are the ones to write.

        Raises:
            CheckpointError: some rank could not write. Nothing of it is left, and earlier checkpoints are untouched.
        """
        try:
            # The manifest is written last and the folder renamed after that: a save that dies leaves nothing
            # under the name of a checkpoint
            folder = self.ranks.on_rank0(lambda: self.storage.begin(step))
            files = self.writer.write(folder, state.tensors, staged, self.ranks)
            self.ranks.on_rank0(lambda: self._commit(step, folder, files, state.values))
        except CheckpointError as error:
            raise self.failure(step, error) from error
        return self.storage.path(step)

    def failure(self, step: int, cause: CheckpointError) -> CheckpointError:
        """The error to raise when `step` could not be saved; removes its unfinished files. Collective."""
        return CheckpointError(self.ranks.on_rank0(lambda: self._give_up(step, str(cause))))

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest intact checkpoint: its folder and manifest. Collective; all ranks take the same one.

        Damaged ones are named in a warning and passed over.

        Raises:
            CheckpointError: there are checkpoints, and none is intact.
        """
        faults = []
        # Rank 0 lists the steps for all: a network file system may show the ranks different folders
        for step in reversed(self.ranks.on_rank0(self.steps)):
            path = self.storage.path(step)
            try:
                return path, verify(path, self.how, self.ranks)
            except CheckpointError as error:
                faults.append(str(error))
                self._warn(f"passing over a damaged checkpoint: {error}")
        if faults:  # not None: a run that quietly began anew would bury the checkpoints that a repair may save
            raise CheckpointError("no checkpoint is intact: " + "; ".join(faults))
        return None

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        return list(self.storage.steps())

    def to_prune(self) -> list[int]:
        """The steps whose checkpoints retention does not keep."""
        steps = self.steps()
        return self.retention.to_delete(steps, self._metrics(steps))

    def prune(self, intact: int | None = None) -> list[int]:
        """Delete the checkpoints that retention does not keep; returns their steps. Not collective: for rank 0 alone.

        Args:
            intact: a step known to be intact, having just been saved or loaded; it stays whatever retention says. If
                there is none, at least one of those that stay must be whole by the sizes of its files.
        """
        # A newer one may be damaged in a way that sizes do not show: with `keep = 1` it would be all that is left
        doomed = [step for step in self.to_prune() if step != intact]
        staying = [step for step in self.steps() if step not in doomed]
        if doomed and intact not in staying and not any(self._whole(step) for step in reversed(staying)):
            self._warn(f"none of the checkpoints to keep (steps {staying}) is whole, so nothing is deleted")
            return []
        for step in doomed:
            self.storage.delete(step)
        return doomed

    def tidy(self, intact: int) -> None:
        """Do what a process that was killed right after its save left undone. Collective; `intact` as for `prune`."""
        self.ranks.on_rank0(lambda: self._tidy(intact))

    def _tidy(self, intact: int) -> None:
        """Delete what retention does not keep and what dead saves have left."""
        try:
            self.storage.clear()
            self.prune(intact)
        except OSError as error:  # no failed save: the checkpoint itself is committed by now
            self._warn(f"could not delete an old checkpoint: {error}")

    def _commit(self, step: int, folder: Path, files: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        manifest = {"format": FORMAT, "step": step, "time": time.time(), "files": files, **values}
        write_manifest(folder, manifest)
        self.storage.commit(step)
        self._tidy(step)  # after the commit: until then the older ones are all that a crash would leave

    def _give_up(self, step: int, fault: str) -> str:
        """Remove the files of an unfinished checkpoint; returns the message."""
        self.storage.discard(step)
        folder = self.storage.path(step).parent
        steps = self.steps()
        left = f"checkpoints of steps {_listed(steps)} are untouched" if steps else "there is no earlier one"
        return f"could not save step {step} in {folder}: {fault}; {_free_space(folder)} free there; {left}"

    def _metrics(self, steps: Sequence[int]) -> dict[int, float]:
        """Step -> the metric of the last evaluation before it."""
        metrics: dict[int, float] = {}
        evaluations = set()
        for step in steps if self.retention.keep_best else ():
            evaluation = self._read(step).get("evaluation", {})
            value = evaluation.get("metrics", {}).get(self.retention.best_metric)
            # An evaluation counts for the first checkpoint after it only, so that the best are of different evaluations
            if value is not None and evaluation["step"] not in evaluations:
                evaluations.add(evaluation["step"])
                metrics[step] = value
        return metrics

    def _read(self, step: int) -> dict[str, Any]:
        """A manifest; empty if it cannot be read."""
        try:
            return read_manifest(self.storage.path(step))
        except CheckpointError:
            return {}

    def _whole(self, step: int) -> bool:
        manifest = self._read(step)
        return bool(manifest) and not find_faults(self.storage.path(step), manifest, list(manifest["files"]), "sizes")

    def _warn(self, message: str) -> None:
        if self.ranks.rank == 0:
            warnings.warn(message, stacklevel=3)


def verify(folder: Path, how: How, ranks: Ranks | None = None) -> dict[str, Any]:
    """Check the files of a checkpoint against its manifest, which is returned.

    Collective: each rank checks its share of the files, and all reach the same result.

    Raises:
        CheckpointError: names each file and what is wrong with it.
    """
    ranks = ranks or Ranks()
    manifest = ranks.on_rank0(lambda: read_manifest(folder))
    # The largest first, so that every rank has about as much to read
    names = sorted(manifest["files"], key=lambda name: -manifest["files"][name]["size"])
    mine = find_faults(folder, manifest, names[ranks.rank :: ranks.world_size], how)
    faults = [fault for of_rank in gather_objects(mine, ranks.group) for fault in of_rank]
    if faults:
        raise CheckpointError("; ".join(faults))
    return manifest


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps if len(steps) < 8 else [*steps[:3], "…", *steps[-3:]]))


def _free_space(folder: Path) -> str:
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    return f"{shutil.disk_usage(existing).free / 1e9:.1f} GB"
