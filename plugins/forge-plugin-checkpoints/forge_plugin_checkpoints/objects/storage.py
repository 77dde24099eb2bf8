"""Checkpoints as objects: `step-N/FILE` for each file, of which the manifest is put last and deleted first."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge_core import CheckpointError, report_progress
from forge_core.checkpoint.storage import MANIFEST, UNFINISHED, read_manifest
from forge_core.contracts.runtime import SpreadStorage
from forge_plugin_checkpoints.objects.bucket import BLOCK, Bucket


class ObjectStorage(SpreadStorage):
    """See `SpreadStorage`. `step-N` is committed when, and only when, its manifest is in the bucket.

    A step that was committed before, and is saved again because it is damaged, loses its manifest when that begins.
    """

    # An object store has no rename, but a put happens as a whole or not at all: so the last of them is the commit.

    def __init__(self, bucket: Bucket, cache: Path) -> None:
        self._bucket, self._cache = bucket, cache
        self._rank, self._world_size = 0, 1
        self._checked: set[tuple[int, str]] = set()
        """Files in the cache that this process has downloaded or compared with the manifest."""
        self._sizes: dict[int, dict[str, int]] = {}
        self._lock = threading.Lock()

    def join(self, gather: Callable[[Any], list[Any]]) -> None:
        """Check that each rank can write to the bucket; raises a `CheckpointError` on all ranks if one cannot."""
        # A unique mark: what is gathered comes in the order of ranks, and shows this rank's number
        mark, fault = uuid.uuid4().hex, ""
        try:
            self._bucket.check_access()
        except CheckpointError as error:
            fault = str(error)
        # Faults travel with the marks: a rank that raised here would leave the others waiting
        marks, faults = zip(*gather((mark, fault)), strict=True)
        self._rank, self._world_size = marks.index(mark), len(marks)
        if broken := [f"rank {rank}: {text}" for rank, text in enumerate(faults) if text]:
            raise CheckpointError("; ".join(broken[:3]))

    # --- saving --------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> Path:
        """Also deletes the step's manifest in the bucket, so that the step is not committed while it is written."""
        self._forget(step)
        if self._rank == 0:
            self._bucket.remove(f"step-{step}/{MANIFEST}")  # a save that dies must not leave it to files of two saves
            self.clear()
        # A folder for each rank: `publish` takes all of it
        unfinished = self._unfinished(step)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        return unfinished

    def publish(self, step: int) -> None:
        """Upload all files of this rank; rank 0 writes the manifest only after this."""
        names = sorted(path.name for path in self._unfinished(step).iterdir())
        self._upload(step, names)

    def _upload(self, step: int, names: Sequence[str]) -> None:
        folder, threads = self._unfinished(step), min(len(names), 8) or 1
        self._bucket.in_parallel(lambda n: self._bucket.upload(folder / n, f"step-{step}/{n}", threads), names)

    def commit(self, step: int) -> Path:
        """Upload the manifest from rank 0; then move the files of this rank into the cache, for later reads."""
        if self._rank == 0:
            self._upload(step, [MANIFEST])
        # Local files are kept until the next commit: a run that ended and is resumed here downloads nothing
        folder = self.path(step)
        folder.mkdir(parents=True, exist_ok=True)
        for path in self._unfinished(step).iterdir():
            path.replace(folder / path.name)
            self._checked.add((step, path.name))  # written by this process, so there is nothing to verify
        shutil.rmtree(self._unfinished(step), ignore_errors=True)
        for other in self._cache.glob("step-*"):
            if other.name not in (folder.name, folder.name + UNFINISHED):
                shutil.rmtree(other, ignore_errors=True)
        return folder

    def discard(self, step: int) -> None:
        """Delete the objects unless the manifest is there: the step is committed then, and only an answer was lost."""
        shutil.rmtree(self._unfinished(step), ignore_errors=True)
        if self._rank == 0 and not self._bucket.exists(f"step-{step}/{MANIFEST}"):
            self._bucket.remove_folder(f"step-{step}")

    def clear(self) -> None:
        """Delete on rank 0 what has no manifest, and uploads in parts that were never finished."""
        if self._rank == 0:
            self._bucket.abort_uploads()
            for folder, committed in self._folders():
                if not committed:
                    self._bucket.remove_folder(folder)

    # --- reading -------------------------------------------------------------------------------------------------

    def steps(self) -> Sequence[int]:
        """Returns committed steps from the bucket at each call: one listing, and one request for each step."""
        return sorted(int(name.removeprefix("step-")) for name, committed in self._folders() if committed)

    def _folders(self) -> list[tuple[str, bool]]:
        """Folders of steps, and whether each is committed."""
        folders = [name for name in self._bucket.folders() if name.removeprefix("step-").isdigit()]
        committed = self._bucket.in_parallel(lambda name: self._bucket.exists(f"{name}/{MANIFEST}"), folders)
        return list(zip(folders, committed, strict=True))

    def folder(self, step: int) -> Path:
        """Returns the step's folder in the cache, in which files may be missing until `fetch`."""
        return self._cache / f"step-{step}"

    def size(self, step: int, name: str) -> int:
        """Returns the size in the bucket, from a listing that is kept; nothing is downloaded."""
        with self._lock:  # one listing for all threads
            if name not in self._sizes.get(step, {}):
                self._sizes[step] = self._bucket.sizes(f"step-{step}")
        if name not in self._sizes[step]:
            raise FileNotFoundError(name)
        return self._sizes[step][name]

    def fetch(self, step: int, names: Sequence[str]) -> None:
        """Download what the cache lacks or has damaged. Each file is verified once in this process."""
        self.folder(step).mkdir(parents=True, exist_ok=True)
        self._bucket.in_parallel(lambda name: self._fetch(step, name), names)

    def _fetch(self, step: int, name: str) -> None:
        if (step, name) in self._checked:
            return
        local = self.folder(step) / name
        with self._only_one(local):  # of the ranks of this machine downloads it; the others find it
            # The bucket's manifest decides, also against one in the cache
            if name == MANIFEST or not (local.is_file() and self._is_intact(step, local)):
                self._download(step, local)
                if name != MANIFEST and not self._is_intact(step, local):
                    local.unlink()
                    raise CheckpointError(f"{self._name(step, name)} is damaged: its SHA-256 is not the manifest's")
        self._checked.add((step, name))

    def _download(self, step: int, local: Path) -> None:
        try:
            self._bucket.download(f"step-{step}/{local.name}", local)
        except FileNotFoundError as error:
            raise CheckpointError(f"{self._name(step, local.name)} is missing") from error

    def _is_intact(self, step: int, local: Path) -> bool:
        entry = read_manifest(self.path(step))["files"].get(local.name)
        # The size first, which takes no reading
        if entry is None or local.stat().st_size != entry["size"]:
            return False
        digest = hashlib.sha256()
        with local.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
                report_progress("verifying")
        return digest.hexdigest() == entry["sha256"]

    def _name(self, step: int, name: str) -> str:
        return f"{self._bucket.url}/step-{step}/{name}"

    @contextmanager
    def _only_one(self, local: Path) -> Iterator[None]:
        with open(local.with_name(f".{local.name}.lock"), "w") as lock:
            # Between processes, as ranks are; the system releases it if this one dies
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    # --- deleting ------------------------------------------------------------------------------------------------

    def delete(self, step: int) -> None:
        """Delete the step from the bucket on rank 0, and from the cache of this machine."""
        if self._rank == 0:
            self._bucket.remove(f"step-{step}/{MANIFEST}")  # first: half a checkpoint never looks like one
            self._bucket.remove_folder(f"step-{step}")
        shutil.rmtree(self.folder(step), ignore_errors=True)
        self._forget(step)

    def _forget(self, step: int) -> None:
        self._checked = {known for known in self._checked if known[0] != step}
        self._sizes.pop(step, None)

    def close(self) -> None:
        """All uploads were waited for when they were committed."""

    def _unfinished(self, step: int) -> Path:
        return self._cache / f"step-{step}{UNFINISHED}" / f"rank-{self._rank}"
