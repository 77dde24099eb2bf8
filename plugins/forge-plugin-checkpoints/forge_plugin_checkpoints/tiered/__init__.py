"""Checkpoints in the memory of the machines: the storage `tiered`."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define, field, frozen
from attrs.validators import ge, min_len

from forge_core import Problem, StorageComponent, TrainingHook, default_type
from forge_core.contracts.components import FilePath

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext, TrainContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.runtime import Storage
    from forge_core.job import Job

NODE = "FORGE_NODE"
"""Environment variable that names the machine, where its host name is not unique."""

__all__ = ["Tiered"]


def this_node() -> str:
    """Returns the name of this machine, unique among the run's machines."""
    return os.environ.get(NODE) or socket.gethostname()


@frozen(kw_only=True)
class Tiered(StorageComponent):
    """Every checkpoint in memory, with copies on other machines, and each `durable_every`-th also in another storage.

    After the loss of a machine, a run continues from the newest checkpoint of which every file is still available: on
    the machine that wrote it, on a neighbour, or in `durable`.
    """

    fast: FilePath = field(default="/dev/shm/forge", validator=min_len(1))  # noqa: S108  # made with the user's rights only
    """Folder in memory (tmpfs) on each machine; `{node}` in it is the machine's name. Each run has its own folder in
    it, which a run that ends in order removes."""
    copies: int = field(default=1, validator=ge(0))
    """Other machines that each rank sends its files to: the number of machines that may be lost at a time."""
    durable_every: int = field(default=20, validator=ge(1))
    """Each so many saves, one is also written to `durable`, in the background; so are those that are kept forever, and
    the last one before the run ends or is stopped."""
    durable: StorageComponent = default_type("forge-run/local")
    """`[checkpoint.storage.durable]`: the storage of those checkpoints. The keys of `[checkpoint]` determine which
    checkpoints it deletes; in memory, only the newest checkpoint stays."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if isinstance(self.durable, Tiered):
            yield Problem("durable.type", "must be a storage that outlives the machines, such as local or objects")

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        """Yields a line about the places of checkpoints."""
        where = f"in memory ({self.fast}), copies on {self.copies} other machine{'' if self.copies == 1 else 's'}"
        yield "checkpoints", f"{where}, every {self.durable_every}th also kept", context.type_of(self.durable)

    def training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """Adds the check of memory, which needs the model and the optimizer."""
        return [MemoryCheck(copies=self.copies)]

    def build(self, context: BuildContext) -> Storage:
        """Makes the storage with a folder in memory for this run alone."""
        from forge_plugin_checkpoints.tiered.storage import TieredStorage

        assert context.folder is not None
        # Runs of one name in different folders must not meet in the memory of a machine
        mark = hashlib.sha256(os.path.abspath(context.folder).encode()).hexdigest()[:8]
        fast = Path(self.fast.replace("{node}", this_node())) / f"{context.folder.name}-{mark}"
        durable = context.build(self.durable)
        return TieredStorage(fast, durable, context.job.checkpoint, copies=self.copies, every=self.durable_every)


@define(kw_only=True, slots=False)
class MemoryCheck(TrainingHook):
    """Refuses, before the first step, checkpoints that need too much of the machine's memory."""

    resumes_as = "safe"

    copies: int = 1

    def on_train_begin(self, context: TrainContext) -> None:
        """Compare an estimate of a checkpoint with the memory; the first save repeats it with the true size."""
        from forge_plugin_checkpoints.tiered.memory import check_room, estimated_state, local_ranks

        check_room(local_ranks() * estimated_state(context.model, context.optimizer), self.copies)
