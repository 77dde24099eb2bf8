"""Writes samples to a folder of the run, by all ranks together.

Shapes: N samples, m of them on a rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from forge_core.checkpoint.run_folder import JOB
from forge_core.contracts.errors import ForgeError, JobError, Problem
from forge_core.parallel.mesh import gather_objects, global_rank
from forge_plugin_taps.division import Division, group_along
from forge_plugin_taps.kinds import Sink
from forge_plugin_taps.tensor_file import DTYPES, TensorFile

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_plugin_taps.kinds import TapsInfo
    from forge_plugin_taps.samples import LocalPart, Sample
    from forge_plugin_taps.store import Store

FOLDER, MANIFEST, TOKENS = "taps", "taps.json", "tokens"
FORMAT = 1


@define
class _Pending:
    """A step whose values are being copied to the host."""

    sample: Sample
    rows: dict[str, tuple[Tensor, Tensor]] = field(factory=dict)
    """By point: numbers of the rows that this rank writes (m,), and their values (m, …) on the CPU."""
    copied: Any = None
    """The event behind the copies."""


class StoreError(ForgeError):
    """A step cannot be written."""


class StoreWriter(Sink):
    """See `Store`.

    A step's folder has another name until it is complete, so a run that is killed leaves no partial step. When a run
    continues, the folders of later steps are removed, since these steps are repeated. So only the steps up to a
    checkpoint must survive a crash of the machine, and files are synced when one is saved: by then most have been
    written.
    """

    def __init__(self, component: Store, context: BuildContext, taps: TapsInfo) -> None:
        if context.folder is None:
            raise JobError(
                [Problem("parallel.taps.sinks", "a store needs the folder of a run, and this run keeps none")]
            )
        self._folder, self._keep, self._taps = context.folder / FOLDER, component.keep, taps
        self._fails = component.on_error == "fail"
        self._sharers = group_along(Division.of(context.job, context.layout).features, context.mesh)
        self._device = context.device
        self._job = context.folder / JOB
        self._seed = context.job.job.seed
        self._pending: _Pending | None = None
        self._unsynced: list[Path] = []

    def start(self, step: int) -> None:
        """Removes folders of steps after `step`, and incomplete ones, on rank 0. Collective."""
        self._pending = None
        if global_rank() == 0:
            for path in self._folder.glob("*step-*"):
                # A name with a dot is of a step that was not completed
                if path.name.startswith(".") or _step(path) > step:
                    shutil.rmtree(path)
        gather_objects(None)  # no rank writes a step that another is about to remove

    def consume(self, sample: Sample) -> None:
        """Starts to copy this rank's share of each point to the host; nothing is written yet."""
        self._pending = pending = _Pending(sample)
        for name in sample.points:
            part = sample.local(name)
            if part is not None and part.counted:
                rows, values = self._own_rows(part)
                pending.rows[name] = rows, values.to("cpu", non_blocking=True)
        # After the copies of all points, which are on one stream: one event is enough
        pending.copied = torch.get_device_module(self._device).Event()
        pending.copied.record()

    def _own_rows(self, part: LocalPart) -> tuple[Tensor, Tensor]:
        """Returns the rows that this rank writes, whole. Collective over ranks that share features."""
        if part.split is None:
            return part.index, part.values
        group = self._sharers
        assert group is not None
        values = part.values.contiguous()
        parts = [torch.empty_like(values) for _ in range(group.size())]
        dist.all_gather(parts, values, group=group)
        # Each of the ranks has all heads or features now, and writes its share of the rows.
        rank, whole = dist.get_rank(group), torch.cat(parts, 1)
        return part.index.tensor_split(len(parts))[rank], whole.tensor_split(len(parts))[rank]

    def settle(self) -> None:
        """Write the step that was consumed last. Collective."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.copied.synchronize()
        self._try(lambda: self._store(pending))

    def _try(self, work: Callable[[], None]) -> None:
        """Do what may fail on every rank together, as `on_error` has it."""
        try:
            work()
        except StoreError as error:
            if self._fails:
                raise
            if global_rank() == 0:
                warnings.warn(f"{error}. Training continues without it (on_error)", stacklevel=2)

    def _store(self, pending: _Pending) -> None:
        """Write a step. Collective."""
        step = pending.sample.step
        whole, partial = self._folder / f"step-{step}", self._folder / f".step-{step}"
        files = self._files(pending.sample, partial)
        self._agreed(step, lambda: partial.mkdir(parents=True) if global_rank() == 0 else None)
        # Collective the first time, so outside of the work that may fail on one rank
        tokens = pending.sample.tokens
        self._agreed(step, lambda: self._write(pending, files, tokens))
        own = self._own_share(files)
        # Read again, as rows came from several ranks; files are divided among ranks
        digests = self._agreed(step, lambda: {name: _digest(files[name].path) for name in own})
        self._unsynced += [whole / files[name].path.name for name in own]
        merged = {name: digest for part in digests for name, digest in part.items()}
        if global_rank() == 0:
            manifest = self._manifest(step, files, merged)
            # The other ranks take part below, with nothing to do.
            self._agreed(step, lambda: self._commit(partial, whole, manifest))
            self._unsynced += [whole / MANIFEST, whole, self._folder]
        else:
            self._agreed(step, lambda: None)

    def state_dict(self) -> Mapping[str, Any]:
        """Returns nothing, but brings to the disk what the checkpoint that is about to be saved must find there."""
        paths, self._unsynced = self._unsynced, []
        self._try(lambda: self._sync(paths))
        return {}

    def _sync(self, paths: list[Path]) -> None:
        self._agreed(0, lambda: list(map(_sync, filter(Path.exists, paths))))

    def close(self, final: bool) -> None:
        """Syncs the files of steps since the last checkpoint; `settle` has written them before. Collective."""
        self.state_dict()

    @staticmethod
    def _own_share(files: Mapping[str, TensorFile]) -> list[str]:
        """Names of the files that this rank reads again for their digests, and syncs."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return list(files)[global_rank() :: ranks]

    def _files(self, sample: Sample, folder: Path) -> dict[str, TensorFile]:
        """Returns the files of a step, by point."""
        shapes: dict[str, dict[str, Any]] = {TOKENS: {name: (torch.int64, (len(sample),)) for name in sample.tokens}}
        shapes |= {name: {name: (sample.dtype(name), sample.shape(name))} for name in sample.points}
        return {name: TensorFile(folder / f"{name}.safetensors", shape) for name, shape in shapes.items()}

    def _write(self, pending: _Pending, files: Mapping[str, TensorFile], tokens: Mapping[str, Tensor]) -> None:
        for name, (rows, values) in pending.rows.items():
            files[name].write_rows(name, rows, values)
        # One writer for header and tokens, which are equal on every rank
        if global_rank():
            return
        for file in files.values():
            file.write_header()
        for name, column in tokens.items():
            files[TOKENS].write_rows(name, torch.arange(len(column)), column)

    def _manifest(self, step: int, files: Mapping[str, TensorFile], digests: Mapping[str, str]) -> dict[str, Any]:
        entries = {}
        for name, file in files.items():
            entry: dict[str, Any] = {"sha256": digests[name]}
            if name != TOKENS:
                dtype, shape = file.shapes[name]
                info = self._taps.points[name]
                entry |= {"shape": shape, "dtype": DTYPES[dtype], "axes": info.axes, "layer": info.layer}
            entries[file.path.name] = entry
        job = hashlib.sha256(self._job.read_bytes()).hexdigest() if self._job.exists() else None
        selection = {"seed": self._seed, "interval": self._taps.interval, "positions": self._taps.positions}
        return {"format": FORMAT, "step": step, "selection": selection, "job_sha256": job, "files": entries}

    def _commit(self, partial: Path, whole: Path, manifest: Mapping[str, Any]) -> None:
        with (partial / MANIFEST).open("w") as file:
            json.dump(manifest, file, indent=1)
        if whole.exists():  # a run that went back to a state in memory makes its steps again
            shutil.rmtree(whole)
        partial.rename(whole)
        # After the rename, so that a failure to write leaves as many steps as before
        old = sorted((path for path in self._folder.glob("step-*")), key=_step)
        for path in old[: -self._keep] if self._keep else ():
            shutil.rmtree(path)

    def _agreed(self, step: int, work: Callable[[], Any]) -> list[Any]:
        """Returns the result of `work` on every rank. Collective.

        Raises:
            StoreError: it failed on some rank, on every rank.
        """
        # A rank that raised alone would leave the others waiting, and the reason in its log only.
        result, error = None, ""
        try:
            result = work()
        except OSError as raised:
            error = f"{raised.strerror}: {raised.filename or self._folder} (rank {global_rank()})"
        outcomes = gather_objects((result, error))
        errors = [text for _, text in outcomes if text]
        if errors:
            if global_rank() == 0:
                shutil.rmtree(self._folder / f".step-{step}", ignore_errors=True)
            hint = "free space, or store fewer points, positions or steps (`points`, `positions`, `interval`, `keep`)"
            what = f"step {step}" if step else "the steps before a checkpoint"
            raise StoreError(f"taps: cannot store {what}: {errors[0]}; {hint}")
        return [result for result, _ in outcomes]


def _step(path: Path) -> int:
    number = path.name.rpartition("-")[2]
    return int(number) if number.isdigit() else 0


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Make a file, or the names in a folder, outlive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
