"""Saving and loading whole checkpoints.

A checkpoint is one folder for all ranks: tensors by DCP with a JSON index, and `manifest.json`, written last, which
holds everything that is not a tensor and the size and SHA-256 of every file. The folder appears under its name only
when all of it is on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from forge_core.errors import CheckpointError

if TYPE_CHECKING:
    from forge_core.protocols import Storage

MANIFEST = "manifest.json"
FORMAT = 1


@frozen
class State:
    """What a checkpoint holds: tensors by name, and plain types."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, storage: Storage, keep: int, verify: Literal["full", "sizes"]) -> None:
        self._storage = storage
        self._keep = keep
        self._verify: Literal["full", "sizes"] = verify

    def save(self, step: int, state: State) -> Path:
        """Write the checkpoint of `step` and delete those beyond the number to keep. Collective.

        Raises:
            CheckpointError: some rank could not write; earlier checkpoints are untouched.
        """
        folder = _broadcast(self._storage.begin(step) if _first() else None)
        try:
            digests = _write_tensors(folder, state.tensors)
            error = ""
        except Exception as failure:  # told to all ranks, which then fail together
            digests, error = {}, f"{type(failure).__name__}: {failure}"
        gathered = _gather((digests, error))
        errors = [f"rank {rank}: {what}" for rank, (_, what) in enumerate(gathered) if what]
        if errors:
            raise CheckpointError(f"could not save step {step}: {'; '.join(errors)}")
        files = {name: entry for files, _ in gathered for name, entry in files.items()}
        final = self._storage.path(step)
        if _first():
            write_manifest(
                folder, {"format": FORMAT, "step": step, "time": time.time(), "files": files, **state.values}
            )
            self._storage.commit(step)
            self._prune()
        _barrier()
        return final

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest intact checkpoint: its folder and manifest. Damaged ones are named in a warning and passed over.

        Raises:
            CheckpointError: there are checkpoints, and none is intact.
        """
        faults = []
        for step in reversed(self._storage.steps()):
            path = self._storage.path(step)
            try:
                return path, verify(path, self._verify)
            except CheckpointError as error:
                faults.append(str(error))
                warnings.warn(f"passing over a damaged checkpoint: {error}", stacklevel=2)
        if faults:
            raise CheckpointError("no checkpoint is intact: " + "; ".join(faults))
        return None

    def steps(self) -> list[int]:
        """Steps that have a checkpoint."""
        return list(self._storage.steps())

    def _prune(self) -> None:
        if self._keep:
            for step in list(self._storage.steps())[: -self._keep]:
                self._storage.delete(step)


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    from torch.distributed.checkpoint.state_dict_saver import save

    from forge_core.checkpoint.index import INDEX, JsonIndexWriter

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(dict(tensors), storage_writer=JsonIndexWriter(folder, sync_files=True))
    mine = [*folder.glob(f"__{dist.get_rank()}_*"), *([folder / INDEX] if _first() else [])]
    return {path.name: _describe(path) for path in mine}


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write and flush the manifest.

    Raises:
        CheckpointError: some state is not of a plain type.
    """
    try:
        text = json.dumps(manifest, indent=1)
    except TypeError as error:
        raise CheckpointError(f"state must be tensors or plain types: {error}") from error
    with (folder / MANIFEST).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def verify(folder: Path, how: Literal["full", "sizes"]) -> dict[str, Any]:
    """Check the files of a checkpoint against its manifest, and give the manifest.

    Raises:
        CheckpointError: names the file and what is wrong with it.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / MANIFEST}: {type(error).__name__}: {error}") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: format {manifest.get('format')!r}; this version of forge-run reads {FORMAT}")
    for name, entry in manifest["files"].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != entry["size"]:
            found = "is missing" if size is None else f"has {size} bytes"
            raise CheckpointError(f"{path} {found}, the manifest says {entry['size']}")
        if how == "full" and _sha256(path) != entry["sha256"]:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is not the manifest's")
    return manifest


def stored_tensors(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Name -> (shape, dtype) of every tensor in a checkpoint."""
    from forge_core.checkpoint.index import read_index

    entries: Mapping[str, Any] = read_index(folder).state_dict_metadata
    return {name: (entry.size, entry.properties.dtype) for name, entry in entries.items()}


def load_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors`, in place, from a checkpoint; they may be sharded in any way. Collective.

    Raises:
        CheckpointError: the checkpoint lacks one of them, has it in another shape, or cannot be read.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    from forge_core.checkpoint.index import JsonIndexReader, TensorsOnly

    _check_fit(folder, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load(dict(tensors), storage_reader=JsonIndexReader(folder), planner=TensorsOnly())
        except CheckpointException as error:
            causes = "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items())
            raise CheckpointError(f"cannot read {folder}: {causes}") from error


def _check_fit(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    stored = stored_tensors(folder)
    problems = []
    for name, tensor in tensors.items():
        if name not in stored:
            problems.append(f"{name} is missing")
        elif stored[name][0] != tensor.shape:
            problems.append(f"{name} is {list(stored[name][0])} in the checkpoint, {list(tensor.shape)} in this job")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise CheckpointError(f"{folder} does not fit the job: {'; '.join(problems[:5])}{more}")


def _describe(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _gather(value: Any) -> list[Any]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _broadcast(value: Any) -> Any:
    return next(v for v in _gather(value) if v is not None)


def _barrier() -> None:
    _gather(None)
