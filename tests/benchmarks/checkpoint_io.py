"""Saving and loading a state of 50 million parameters with AdamW (fp32, 600 MB), against plain DCP in the same run.

python tests/benchmarks/checkpoint_io.py [--rounds 7] [--folder FOLDER]

Sides take turns; each save is flushed to the disk (DCP's default), and old files are deleted outside the measurement.
`cold` loads come from the disk: the files are dropped from the page cache before. Ratios are of medians. What SHA-256
costs depends on whether the processor has instructions for it, so a save without it is measured too.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from forge_core.checkpoint.manager import Checkpoints, Retention, Saver, State
from forge_core.checkpoint.storage import LocalStorage
from forge_core.checkpoint.tensors import load_tensors
from forge_core.job import CheckpointSection

DIM, HIDDEN, LAYERS, VOCABULARY = 512, 1536, 12, 16384


def make_state() -> dict[str, torch.Tensor]:
    """Parameters of a decoder and AdamW's state of them."""
    shapes = {"embedding": (VOCABULARY, DIM)}
    for layer in range(LAYERS):
        shapes |= {f"layers.{layer}.{name}": (DIM, DIM) for name in ("query", "key", "value", "output")}
        shapes |= {f"layers.{layer}.{name}": (HIDDEN, DIM) for name in ("gate", "up")}
        shapes[f"layers.{layer}.down"] = (DIM, HIDDEN)
    state = {}
    for name, shape in shapes.items():
        state[f"model.{name}"] = torch.randn(shape)
        state[f"optimizer.{name}.step"] = torch.tensor(1.0)
        state[f"optimizer.{name}.exp_avg"] = torch.randn(shape)
        state[f"optimizer.{name}.exp_avg_sq"] = torch.rand(shape)
    return state


class Times:
    """Wall and CPU seconds by name."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = defaultdict(list)
        self.cpu: dict[str, list[float]] = defaultdict(list)

    def measure(self, name, action) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        action()
        self.wall[name].append(time.perf_counter() - wall)
        self.cpu[name].append(time.process_time() - cpu)

    def report(self, rows) -> None:
        print("| | wall s, median | least | CPU s | ratio wall | ratio CPU |\n|---|---|---|---|---|---|")
        for name, base in rows:
            wall, cpu = statistics.median(self.wall[name]), statistics.median(self.cpu[name])
            to_wall, to_cpu = statistics.median(self.wall[base]), statistics.median(self.cpu[base])
            least = min(self.wall[name])
            print(f"| {name} | {wall:.3f} | {least:.3f} | {cpu:.3f} | {wall / to_wall:.2f} | {cpu / to_cpu:.2f} |")


class NoHashing:
    """Stands for `hashlib`: takes no time."""

    @staticmethod
    def sha256():
        return SimpleNamespace(update=lambda data: None, hexdigest=lambda: "")


def delete(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    os.sync()


def drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def sha256_speed() -> float:
    """GB/s of one thread."""
    data = bytes(1 << 26)
    began = time.perf_counter()
    hashlib.sha256(data).digest()
    return len(data) / (time.perf_counter() - began) / 1e9


def run(folder: Path, rounds: int) -> None:
    state, times = make_state(), Times()
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    size = sum(tensor.nbytes for tensor in state.values())
    print(f"{size / 1e6:.0f} MB in {len(state)} tensors; {torch.get_num_threads()} threads; torch {torch.__version__}")
    storage = LocalStorage(folder / "forge")
    checkpoints = {how: Checkpoints(storage, Retention(), how) for how in ("full", "sizes")}
    section = CheckpointSection(async_save=True, storage=None)
    saver = Saver(section, checkpoints["sizes"], lambda: None, lambda step, path: None)

    def load(how: str) -> None:
        path, _ = checkpoints[how].newest()
        load_tensors(path, target)

    def plain(action, **more) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            action(checkpoint_id=folder / "plain", **more)

    for step in range(rounds + 1):
        with mock.patch("forge_core.checkpoint.storage.hashlib", NoHashing):
            times.measure("Forge, save without SHA-256", lambda: checkpoints["sizes"].save(0, State(state, {})))
        delete(folder)
        times.measure("plain DCP, save", lambda: plain(dcp.save, state_dict=state))
        times.measure("Forge, save", lambda: checkpoints["sizes"].save(1, State(state, {})))
        os.sync()
        times.measure("plain DCP, load", lambda: plain(dcp.load, state_dict=target))
        times.measure("Forge, load, sizes", lambda: load("sizes"))
        times.measure("Forge, load, full", lambda: load("full"))
        assert all(torch.equal(state[name], target[name]) for name in state)
        for name, action in (
            ("plain DCP, load cold", lambda: plain(dcp.load, state_dict=target)),
            ("Forge, load cold, sizes", lambda: load("sizes")),
            ("Forge, load cold, full", lambda: load("full")),
        ):
            drop_from_cache(folder)
            times.measure(name, action)
        times.measure("Forge, asynchronous save, blocked", lambda: saver.save(2, State(state, {})))
        saver.settle()
        delete(folder)
        if step == 0:
            first, times = times.wall["Forge, asynchronous save, blocked"][0], Times()
        print(f"round {step}", file=sys.stderr)
    saver.close()
    times.report(
        [
            ("plain DCP, save", "plain DCP, save"),
            ("Forge, save", "plain DCP, save"),
            ("Forge, save without SHA-256", "plain DCP, save"),
            ("plain DCP, load", "plain DCP, load"),
            ("Forge, load, sizes", "plain DCP, load"),
            ("Forge, load, full", "plain DCP, load"),
            ("plain DCP, load cold", "plain DCP, load cold"),
            ("Forge, load cold, sizes", "plain DCP, load cold"),
            ("Forge, load cold, full", "plain DCP, load cold"),
            ("Forge, asynchronous save, blocked", "Forge, save"),
        ]
    )
    print(f"first asynchronous save, with the allocation of its memory: blocked {first:.3f} s")
    print(f"SHA-256 on this machine: {sha256_speed():.2f} GB/s a thread")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write; by default the temporary folder")
    arguments = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        run(Path(folder), arguments.rounds)


if __name__ == "__main__":
    main()
