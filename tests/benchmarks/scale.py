"""How costs grow with the work: each piece at several sizes, on one core, without a GPU.

python tests/benchmarks/scale.py                    # every piece
python tests/benchmarks/scale.py draw               # one

Seconds are CPU time of the process. docs/benchmarks.md#how-costs-grow has the table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from forge_core import read_metrics
from forge_core.data.order import SampleOrder, whole_shares
from forge_kit.data.token_file import TokenFileWriter
from forge_plugin_memmap import Memmap
from forge_plugin_text import Text
from forge_plugin_text.bytes import ByteTokenizer


def cpu_ms(function: Callable[[], object], rounds: int = 3) -> float:
    """Returns the least CPU time of a call, in milliseconds."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def draw() -> None:
    """A rank among 512 draws one global batch: its own rows, and the turns of the others."""
    for decimals in (2, 6):
        for sources in (1, 50, 500):
            weights = [round(random.Random(number).random() + 0.01, decimals) for number in range(sources)]
            order = SampleOrder(
                [10**9] * sources, [str(n) for n in range(sources)], [(0, whole_shares(weights))], [None] * sources, 1
            )
            for batch in (480, 15_360, 245_760):
                share = max(1, batch // 512)

                def step(batch: int = batch, share: int = share, order: SampleOrder = order) -> None:
                    order.advance(batch // 2)
                    for _ in range(share):
                        next(order)
                    order.advance(batch - batch // 2 - share)

                print(f"{sources} sources, weights of {decimals} decimals, batch of {batch}: {cpu_ms(step):.2f} ms")


def context(folder: Path) -> Any:
    """What a dataset needs of a run of one rank."""
    train, data = SimpleNamespace(seq_len=128), SimpleNamespace(tokenizer=object())
    job = SimpleNamespace(train=train, data=data, model=SimpleNamespace(vocab_size=0))
    os.environ["FORGE_CACHE"] = str(folder / "cache")
    return SimpleNamespace(job=job, tokenizer=ByteTokenizer(), mesh=None)


def started(component: Any, run: Any) -> None:
    """What rank 0 does with a dataset at the start of a run."""
    list(component.problems(run.job, None))
    component.build(run)
    list(component.choices(run))


def shards() -> None:
    """Rank 0 describes shards: `memmap`."""
    for count in (10, 100, 1_000, 10_000):
        with TemporaryDirectory() as folder:
            run = context(Path(folder))
            for number in range(count):
                with TokenFileWriter(Path(folder) / str(number), 257, 256) as writer:
                    writer.add("document", [1, 2])
            component = Memmap(path=folder)
            start = partial(started, component, run)
            first, second = cpu_ms(start, 1), cpu_ms(start)
            print(f"{count} shards: {first:.1f} ms at the first start, {second:.1f} at others")


def texts() -> None:
    """Rank 0 looks at files of text, each once, and tokenises what is new."""
    for count in (1_000, 10_000, 100_000):
        with TemporaryDirectory() as folder:
            run = context(Path(folder))
            (Path(folder) / "data").mkdir()
            for number in range(count):
                path = Path(folder) / "data" / f"{number}.txt"
                path.write_text("some text")
                os.utime(path, (0, 0))
            time.sleep(3)  # a file that changed a moment ago is read again
            component = Text(path=f"{folder}/data")
            start = partial(started, component, run)
            first, second = cpu_ms(start, 1), cpu_ms(start)
            print(f"{count} files: {first:.0f} ms at the first start, {second:.0f} at others")


def metrics() -> None:
    """Metrics of 18 numbers a line, about 450 bytes, are read for a report."""
    for count in (10_000, 100_000, 1_000_000):
        with TemporaryDirectory() as folder:
            path = Path(folder) / "metrics.jsonl"
            with path.open("w") as file:
                for step in range(1, count + 1):
                    row = {"step": step, "loss": 1 / step, **{f"number/{n}": step / (n + 3) for n in range(16)}}
                    file.write(json.dumps(row) + "\n")
            before = memory_mb()
            start = time.process_time()
            rows = read_metrics(path)
            seconds = time.process_time() - start
            print(f"{count} lines: {seconds:.2f} s, {memory_mb() - before:.0f} MB more, {len(rows)} rows")


def memory_mb() -> float:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def schema() -> None:
    """`forge-run explain schema` as a process, with all that is installed."""
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "forge_core", "explain", "schema"]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"{after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime:.2f} s")


PIECES: dict[str, Callable[[], None]] = {
    "draw": draw,
    "shards": shards,
    "texts": texts,
    "metrics": metrics,
    "schema": schema,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", choices=[[], *PIECES], default=[])
    for name in parser.parse_args().pieces or PIECES:
        print(f"\n{name}: {PIECES[name].__doc__}")
        PIECES[name]()


if __name__ == "__main__":
    main()
