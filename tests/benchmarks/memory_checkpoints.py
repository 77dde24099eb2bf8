"""How long a checkpoint blocks training: in memory with a copy on another machine, on the disk, and a mere copy.

python tests/benchmarks/memory_checkpoints.py --rounds 7 --megabytes 256

Two ranks, each a machine of its own by `FORGE_NODE`, with half of the state; files travel by loopback. The rows take
turns in each round. `blocked` is what training waits for; `committed` is when the checkpoint could be loaded.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from forge_core.checkpoint.manager import Checkpoints, Saver
from forge_core.checkpoint.storage import LocalStorage
from forge_core.contracts.runtime import State
from forge_core.job import CheckpointSection
from forge_plugin_checkpoints.tiered import NODE
from forge_plugin_checkpoints.tiered.storage import TieredStorage
from forge_testing.processes import run_on_ranks

TENSORS = 64


def timed(action) -> float:
    dist.barrier()
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(rank: int, folder: Path, megabytes: int, rounds: int) -> dict[str, list[float]]:
    os.environ[NODE] = str(rank)
    elements = megabytes * 1_000_000 // 4 // 2 // TENSORS
    mine = {f"{rank}.{number}": torch.randn(elements) for number in range(TENSORS)}
    memory = [torch.empty_like(tensor) for tensor in mine.values()]
    savers, asynchronous = {}, {}
    for name in ("disk", "memory"):
        for background in (False, True):
            section = CheckpointSection(storage=None, keep=1, async_save=background)
            place = folder / f"{name}-{background}"
            storage = LocalStorage(place)
            if name == "memory":
                fast = Path("/dev/shm") / f"forge-benchmark-{folder.name}-{background}-{rank}"
                storage = TieredStorage(fast, storage, section, copies=1, every=10**6)
            checkpoints = Checkpoints(storage, section, "full")
            checkpoints.steps()
            saver = Saver(section, checkpoints, lambda: None, lambda step, path: None)
            (asynchronous if background else savers)[name] = saver
    times: dict[str, list[float]] = {}

    def note(row: str, seconds: float) -> None:
        times.setdefault(row, []).append(seconds)

    def copy() -> None:
        for target, tensor in zip(memory, mine.values(), strict=True):
            target.copy_(tensor)

    for step in range(1, rounds + 2):  # the first, which allocates, is left out
        state = State(mine, {})
        note("a copy of the same bytes", timed(copy))
        for name, saver in savers.items():
            note(f"{name}, waited for", timed(partial(saver.save, step, state)))
        for name, saver in asynchronous.items():
            began = time.perf_counter()
            note(f"{name}, async_save, blocked", timed(partial(saver.save, step, state)))
            saver.settle()
            note(f"{name}, async_save, committed", time.perf_counter() - began)
    for saver in (*savers.values(), *asynchronous.values()):
        saver.close()
    return {row: values[1:] for row, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=256)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(dir="."))
    try:
        results = run_on_ranks(2, lambda rank: measure(rank, folder, options.megabytes, options.rounds))
    finally:
        shutil.rmtree(folder)
        for left in Path("/dev/shm").glob(f"forge-benchmark-{folder.name}-*"):
            shutil.rmtree(left)
    copy = statistics.median(results[0]["a copy of the same bytes"])
    disk = statistics.median(results[0]["disk, waited for"])
    print(f"{'':36} {'median ms':>10} {'least':>8} {'of a copy':>10} {'of the disk':>12}")
    for row, values in results[0].items():
        median = statistics.median(values)
        print(f"{row:36} {1e3 * median:10.1f} {1e3 * min(values):8.1f} {median / copy:10.2f} {median / disk:12.3f}")


if __name__ == "__main__":
    main()
