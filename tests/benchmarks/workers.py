"""What worker processes load: throughput and start-up with a source that decodes, beside another version of Forge.

python tests/benchmarks/workers.py [--other FOLDER] [--workers 2] [--steps 60] [--rounds 7]

Each figure is that of a process of its own, in turns. FOLDER is a version of `forge-run` to compare with, which
`pip install --no-deps --target FOLDER SOURCE` makes. A sample is 256 KB of compressed noise, which takes 2 to 3 ms to
decode.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
import zlib

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

SIZE, ROWS, LENGTH = 1 << 18, 16, 128


def measure(workers: int, steps: int, method: str) -> dict[str, float]:
    """Seconds to the first step, and from there a step, as wall and CPU time of all processes."""
    import numpy as np
    from attrs import frozen

    warnings.simplefilter("ignore")
    from forge_core import Catalog, DatasetComponent
    from forge_core.data.loader import TrainLoader
    from forge_core.engine.build import build_context, build_datasets
    from forge_testing import tiny_job

    class Images:
        held_out, bytes_per_token = None, None

        def __init__(self) -> None:
            generator = np.random.default_rng(0)
            noise = generator.integers(0, 64, (4, SIZE), dtype=np.uint8)
            self.stored = [zlib.compress(row.tobytes(), 1) for row in noise]

        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            pixels = np.frombuffer(zlib.decompress(self.stored[index % 4]), np.uint8).astype(np.float32)
            tokens = (pixels.reshape(LENGTH, -1).mean(1) + index).astype(np.int64) % 32
            return {"input_ids": tokens, "labels": tokens}

    @frozen(kw_only=True)
    class Decoded(DatasetComponent):
        def build(self, context: object) -> Images:
            return Images()

    catalog = Catalog.installed()
    data: dict[str, object] = {"sources": (Decoded(),), "workers": workers}
    if method != "process":
        from forge_plugin_torchdata import Nodes

        data["loader"] = Nodes(method=method)
    with tempfile.TemporaryDirectory() as folder:
        job = tiny_job(folder, catalog, global_batch_size=ROWS, seq_len=LENGTH, data=data)
        context = build_context(job, catalog, None)
        datasets = build_datasets(job, context)
        began = time.perf_counter()
        loader = TrainLoader(job, datasets, context)
        loader.next_step()
        first = time.perf_counter() - began
        for _ in range(8):
            loader.next_step()
        began = time.perf_counter()
        for _ in range(steps):
            loader.next_step()
        wall = (time.perf_counter() - began) / steps
        loader.close()
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return {"first_s": first, "step_ms": 1e3 * wall, "cpu_s": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.workers, options.steps, options.measure)))
        return
    rows = {"nodes, processes": ("process", None), "nodes, threads": ("thread", None)}
    if options.other:
        rows = {"other, processes": ("process", options.other), **rows}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in rows}
    for _ in range(options.rounds):
        for name, (method, path) in rows.items():
            environment = os.environ | ({"PYTHONPATH": path} if path else {})
            command = [sys.executable, __file__, "--measure", method]
            command += [f"--workers={options.workers}", f"--steps={options.steps}"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{options.workers} workers, {ROWS} samples a step, {options.steps} steps, {options.rounds} rounds: medians")
    for name, values in found.items():
        first, step, cpu = (statistics.median(value[key] for value in values) for key in values[0])
        rate = 1e3 * ROWS / step
        print(
            f"{name:18} {step:7.1f} ms a step ({rate:,.0f} samples/s), first step after {first:.3f} s, CPU {cpu:.1f} s"
        )


if __name__ == "__main__":
    main()
