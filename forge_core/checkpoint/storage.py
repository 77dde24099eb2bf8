"""Folders of checkpoints: the core's storage of them, their manifest, and the comparison of the two.

`manifest.json` holds everything that is not a tensor, and the size and SHA-256 of every other file. It is written last,
and the folder gets its name after that.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Literal

from attrs import frozen

from forge_core.contracts.components import FilePath, StorageComponent
from forge_core.contracts.contexts import BuildContext
from forge_core.contracts.errors import CheckpointError
from forge_core.contracts.runtime import SpreadStorage
from forge_core.files import write_atomically
from forge_core.launch.progress_beacon import report_progress

UNFINISHED = ".tmp"
MANIFEST = "manifest.json"
FORMAT = 2
"""2: tensors as raw bytes."""

BLOCK = 1 << 24
"""Bytes that are hashed, or start on their way to the disk, at a time."""

How = Literal["full", "sizes"]

MALFORMED = (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError)
"""Errors of reading JSON that is missing or not of the expected form."""


@frozen(kw_only=True)
class Local(StorageComponent):
    """A folder on a POSIX file system: `{folder}/step-{N}`, written as `step-{N}.tmp` and renamed when complete."""

    folder: FilePath = "checkpoints"
    """Relative to the run folder."""

    def build(self, context: BuildContext) -> LocalStorage:
        assert context.folder is not None
        return LocalStorage(context.folder / self.folder)


class LocalStorage:
    """See `forge_core.contracts.runtime.Storage`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, step: int) -> Path:
        """Returns `step-N.tmp`, which `steps` does not list."""
        self.clear()  # what dead saves have left takes room, and one of this step would be in the way
        unfinished = self._unfinished(step)
        unfinished.mkdir(parents=True)
        return unfinished

    def commit(self, step: int) -> Path:
        """Renames `step-N.tmp` to `step-N`; an older checkpoint of this step is removed afterwards."""
        # Named so that `clear` removes it after a death between the two renames
        final, replaced = self.path(step), self._folder / f"step-{step}-replaced{UNFINISHED}"
        if os.path.lexists(final):  # a rename replaces a file, but no link, and no folder with files in it
            os.replace(final, replaced)
        publish(self._unfinished(step), final)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def clear(self) -> None:
        """Removes every `step-*.tmp`: unfinished saves, replaced checkpoints, and deletions that were cut short."""
        for left in self._folder.glob(f"step-*{UNFINISHED}"):
            shutil.rmtree(left, ignore_errors=True)

    def discard(self, step: int) -> None:
        shutil.rmtree(self._unfinished(step), ignore_errors=True)

    def steps(self) -> Sequence[int]:
        """Numbers N of the folders `step-N`; links to folders count, other names do not."""
        names = [path.name.removeprefix("step-") for path in self._folder.glob("step-*") if path.is_dir()]
        return sorted(int(name) for name in names if name.isdigit())

    def path(self, step: int) -> Path:
        return self._folder / f"step-{step}"

    def delete(self, step: int) -> None:
        """Raises `OSError` if there is no checkpoint of this step."""
        # Rename first, so that a deletion cut short never leaves half a checkpoint under its name
        unfinished = self._unfinished(step)
        os.replace(self.path(step), unfinished)
        shutil.rmtree(unfinished)

    def _unfinished(self, step: int) -> Path:
        return self._folder / f"step-{step}{UNFINISHED}"


# --- files -------------------------------------------------------------------------------------------------------


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write and flush a file; returns its entry in the manifest. Raises a `CheckpointError` with the file's name."""
    # Hashed on the way, and not by reading the file back: that is no quicker, and needs its pages to be in memory still
    digest, size, flushing = hashlib.sha256(), 0, 0
    try:
        with path.open("wb") as file:
            for data in chunks:
                file.write(data)
                size += len(data)
                if size - flushing >= BLOCK:
                    _start_flush(file, flushing, size)  # before hashing, so that the disk works meanwhile
                    flushing = size
                digest.update(data)
                report_progress("writing")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {describe_fault(error)}") from error
    return {"size": size, "sha256": digest.hexdigest()}


def _start_flush(file: BinaryIO, start: int, end: int) -> None:
    """Let the kernel begin to write these bytes to the disk, so that at the end there is little left to wait for."""
    file.flush()
    if hasattr(os, "posix_fadvise"):
        # Pages that are not needed are written at once, and kept until they are on the disk. `fdatasync` would wait
        os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)


def publish(unfinished: Path, final: Path) -> None:
    """Give a folder, whose files are complete and flushed, its name. Raises an `OSError` if that is a full folder's."""
    sync(unfinished)  # the names of its files are entries of the folder
    os.replace(unfinished, final)
    sync(final.parent)  # a rename is lost in a power cut until its folder is flushed


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- the manifest ------------------------------------------------------------------------------------------------


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write and flush the manifest."""
    write_atomically(folder / MANIFEST, to_json(manifest))


def to_json(values: Mapping[str, Any]) -> str:
    """Plain types as JSON. Raises a `CheckpointError` if something is not plain, or the key of a table no string."""
    _check_keys(values, "")
    try:
        return json.dumps(values, indent=1)
    except TypeError as error:
        raise CheckpointError(f"state must be tensors or plain types: {error}") from error


def _check_keys(value: Any, path: str) -> None:
    """JSON turns keys into strings without a word: a run that continues would not find its own."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"state must be tensors or plain types: a key of {path} is {key!r}, no string")
            _check_keys(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_keys(inner, path)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, not compared with its files.

    Raises a `CheckpointError` if it is missing or does not have the form that this module writes.
    """
    path = folder / MANIFEST
    try:
        fetch(folder, [MANIFEST])
        manifest = json.loads(path.read_text())
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{folder}: format {manifest['format']!r}; this version of forge-run reads {FORMAT}")
        for name, entry in manifest["files"].items():
            own_file(name)
            _ = entry["size"], entry["sha256"]
    except MALFORMED as error:
        raise CheckpointError(f"{path}: {describe_fault(error)}") from error
    return manifest


def manifest_digest(folder: Path) -> str:
    """The SHA-256 of a checkpoint's manifest, which has those of its files."""
    fetch(folder, [MANIFEST])
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()


def fetch(folder: Path, names: Sequence[str]) -> None:
    """Bring files of a checkpoint into its folder, if it is one of a storage that keeps them elsewhere."""
    storage, step = SpreadStorage.opened.get(folder.absolute(), (None, 0))
    if storage:
        storage.fetch(step, names)


def own_file(name: str) -> str:
    """A file's name; raises a `ValueError` if it leaves the checkpoint's folder, as one from a stranger may have it."""
    if "/" in name or name.startswith("."):
        raise ValueError(f"not a file of a checkpoint: {name!r}")
    return name


def find_faults(folder: Path, manifest: Mapping[str, Any], names: Sequence[str], how: How) -> list[str]:
    """The faults of these files of a checkpoint, in words. Not collective."""
    with ThreadPoolExecutor(threads()) as pool:
        faults = pool.map(lambda name: _fault(folder / name, manifest["files"][name], how), names)
        return [fault for fault in faults if fault]


def threads() -> int:
    """How many files this process should read or write at a time: hashing keeps a core busy."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _fault(path: Path, entry: Mapping[str, Any], how: How) -> str:
    try:
        storage, step = SpreadStorage.opened.get(path.parent.absolute(), (None, 0))
        if how == "full":
            fetch(path.parent, [path.name])
        size = storage.size(step, path.name) if storage and how == "sizes" else path.stat().st_size
        if size != entry["size"]:
            return f"{path} has {size} bytes, but the manifest records {entry['size']}"
        if how == "full" and _sha256(path) != entry["sha256"]:
            return f"{path} is damaged: its SHA-256 is not the manifest's"
    except FileNotFoundError:
        return f"{path} is missing, but the manifest records {entry['size']} bytes"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    except CheckpointError as error:
        return str(error)
    return ""


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        # Not `hashlib.file_digest`: a file of many GB takes minutes, and the watchdog must see that this rank moves
        while block := file.read(BLOCK):
            digest.update(block)
            report_progress("verifying")
    return digest.hexdigest()


def describe_fault(error: BaseException) -> str:
    """An exception in words; our own need no class name before theirs."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
