"""The core's storage: checkpoints as folders on a POSIX file system."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from forge_core.contracts.components import StorageComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext

UNFINISHED = ".tmp"


@frozen(kw_only=True)
class Local(StorageComponent):
    """A folder on a POSIX file system: `{folder}/step-{N}`, written as `step-{N}.tmp` and renamed when complete."""

    folder: str = "checkpoints"
    """Relative to the run folder."""

    def build(self, context: BuildContext) -> LocalStorage:
        assert context.folder is not None
        return LocalStorage(context.folder / self.folder)


class LocalStorage:
    """See `forge_core.contracts.runtime.Storage`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, step: int) -> Path:
        self.clear()
        unfinished = self._unfinished(step)
        unfinished.mkdir(parents=True)
        return unfinished

    def commit(self, step: int) -> Path:
        final, replaced = self.path(step), self._folder / f"step-{step}-replaced{UNFINISHED}"
        sync(self._unfinished(step))
        if final.exists():
            os.replace(final, replaced)
        os.replace(self._unfinished(step), final)
        sync(self._folder)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def clear(self) -> None:
        for left in self._folder.glob(f"step-*{UNFINISHED}"):
            shutil.rmtree(left, ignore_errors=True)

    def discard(self, step: int) -> None:
        shutil.rmtree(self._unfinished(step), ignore_errors=True)

    def steps(self) -> Sequence[int]:
        names = [path.name.removeprefix("step-") for path in self._folder.glob("step-*") if path.is_dir()]
        return sorted(int(name) for name in names if name.isdigit())

    def path(self, step: int) -> Path:
        return self._folder / f"step-{step}"

    def delete(self, step: int) -> None:
        """Rename first, so that a deletion cut short never leaves half a checkpoint under its name."""
        unfinished = self._unfinished(step)
        os.replace(self.path(step), unfinished)
        shutil.rmtree(unfinished)

    def _unfinished(self, step: int) -> Path:
        return self._folder / f"step-{step}{UNFINISHED}"


def sync(path: Path) -> None:
    """Flush a file's or a folder's own entry to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
