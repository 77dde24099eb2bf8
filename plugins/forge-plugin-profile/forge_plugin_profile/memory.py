"""Memory: the history of a GPU's allocations, and the peak of a process."""

from __future__ import annotations

import resource
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from forge_core.devices import query_device
from forge_plugin_profile.torch_internals import begin_memory_history, dump_memory_history, end_memory_history

if TYPE_CHECKING:
    from forge_core.contracts.contexts import TrainContext

OUT_OF_MEMORY = Path("profile", "out-of-memory")


class MemoryHistory:
    """A history of this rank's allocations on its GPU, from when it is made."""

    def __init__(self, entries: int) -> None:
        begin_memory_history(entries)

    def write(self, path: Path) -> None:
        """Write the allocations that there are and the history that led to them. A disk that fails is a warning."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            dump_memory_history(str(path))
        except OSError as error:
            warnings.warn(f"hooks.profile: no memory snapshot: {error}", stacklevel=2)

    def write_at_end(self, context: TrainContext) -> None:
        """Write the snapshot of a run whose memory ran out."""
        from forge_core.parallel.mesh import global_rank

        if context.folder is not None:
            self.write(context.folder / OUT_OF_MEMORY / f"rank-{global_rank()}.memory.pickle")

    def close(self) -> None:
        end_memory_history()


def peak_gb(device: torch.device) -> float:
    """Returns the peak in 10^9 bytes: of an accelerator since the end of the step before, of a CPU's process so far."""
    if device.type != "cpu":
        return (query_device(device, "max_memory_allocated") or 0) / 1e9
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9  # which getrusage states in kB
