"""Images a second that a loader decodes, resizes and cuts into patches, and what the training process spends on it.

python tests/benchmarks/images.py [--workers 0 2] [--size 480 640] [--steps 12]

Blurred JPEGs, resized to 224 x 224 pixels. Each figure is that of a loader of its own, in turns; the first steps are
not counted. The CPU time of the training process hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ROWS, COUNT, WARM = 16, 64, 4


def write(folder: Path, height: int, width: int) -> None:
    """Write images with captions beside them."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(COUNT):
        coarse = generator.integers(0, 256, (height // 8, width // 8, 3), np.uint8)
        Image.fromarray(coarse).resize((width, height)).save(folder / f"{number}.jpg", quality=85)
        (folder / f"{number}.txt").write_text("noise")


def measure(folder: Path, workers: int, steps: int) -> tuple[float, float]:
    """Returns images a second of one loader, and CPU time of this process an image in milliseconds."""
    import attrs

    from forge_core import Catalog
    from forge_core.data.loader import TrainLoader
    from forge_core.engine.build import build_context, build_datasets, build_tokenizer
    from forge_plugin_images import ImageText
    from forge_plugin_text import Bytes
    from forge_testing import tiny_job
    from forge_testing.images import tiny_model

    catalog = Catalog.installed()
    data = {"sources": (ImageText(path=str(folder)),), "tokenizer": Bytes(), "workers": workers}
    settings = {"model": tiny_model(224, 224), "seq_len": 800, "global_batch_size": ROWS, "steps": WARM + steps}
    job = tiny_job(str(folder.parent / "runs"), catalog, data=data, **settings)
    context = build_context(job, catalog, None)
    context = attrs.evolve(context, tokenizer=build_tokenizer(job, context))
    loader = TrainLoader(job, build_datasets(job, context), context)
    for _ in range(WARM):
        loader.next_step()
    started, spent = time.perf_counter(), time.process_time()
    for _ in range(steps):
        loader.next_step()
    rate, own = steps * ROWS / (time.perf_counter() - started), (time.process_time() - spent) / steps / ROWS
    loader.close()
    return rate, 1000 * own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--size", type=int, nargs=2, default=[480, 640], metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FORGE_CACHE"] = f"{folder}/cache"
        photos = Path(folder) / "photos"
        photos.mkdir()
        write(photos, *arguments.size)
        results: dict[int, list[tuple[float, float]]] = {workers: [] for workers in arguments.workers}
        for _ in range(arguments.rounds):
            for workers, measured in results.items():
                measured.append(measure(photos, workers, arguments.steps))
        for workers, measured in results.items():
            rate, own = (statistics.median(values) for values in zip(*measured, strict=True))
            print(f"{workers} workers: {rate:.0f} images/s, {own:.2f} ms an image in the training process")


if __name__ == "__main__":
    main()
