"""What a large corpus of ids costs a job: time to start, and memory, with dataset `memmap`.

python tests/benchmarks/data_startup.py [--tokens 500000000] [--rounds 5]

A tiny model trains in a process of its own: on synthetic numbers, on a small corpus, and on one of a gigabyte.
Each corpus comes as a token file with its index, which is what `data prepare` writes, and as raw ids of which every
thousandth document is held out, so that the index must be found in the cache. The first run of each fills the cache and
is not counted. Time is that of a whole process that makes two steps; in turns, so that a busy neighbour slows all of
them. Memory is the peak of a process that makes fifty, which read some thousand windows all over the corpus.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from forge_kit.data.token_file import HEADER, Header

BATCH, LENGTH = 32, 512
FEW, MANY = 2, 50
"""Steps of the runs that are timed, and of those whose memory is looked at."""
VOCABULARY, DOCUMENT = 32, 1000
SMALL = 2_000_000
JOB = f"""
[job]
name = "startup"
[train]
steps = {FEW}
global_batch_size = {BATCH}
seq_len = {LENGTH}
device = "cpu"
[model]
type = "forge_testing:TinyModel"
layers = 1
[optimizer]
type = "forge_testing:TinyAdamW"
[checkpoint]
interval = 0
[loggers.console]
style = "off"
[evaluations.held_out]
sequences = 8
[[data.sources]]
"""
WITHOUT = 'type = "forge_testing:Numbers"\n'
TOKEN_FILE = 'type = "memmap"\npath = "{}.bin"\n'
RAW = """type = "memmap"
path = "{}.raw"
format.type = "raw"
format.dtype = "uint16"
end_of_text = 0
held_out_every = 1000
"""


class Cost(NamedTuple):
    """Of one process."""

    wall: float
    cpu: float
    peak_mb: float


def write_corpus(stem: Path, tokens: int) -> None:
    """Random ids in documents of a thousand, as a token file and raw."""
    generator, block = np.random.default_rng(0), 10**7
    with stem.with_suffix(".bin").open("wb") as file, stem.with_suffix(".raw").open("wb") as raw:
        file.write(Header(2, tokens, tokens // DOCUMENT, 0, VOCABULARY, 0).pack().ljust(HEADER.size))
        for start in range(0, tokens, block):
            ids = generator.integers(1, VOCABULARY, min(block, tokens - start), dtype=np.uint16)
            ids[DOCUMENT - 1 :: DOCUMENT] = 0
            file.write(ids.tobytes())
            raw.write(ids.tobytes())
    np.arange(DOCUMENT, tokens + 1, DOCUMENT, dtype="<i8").tofile(stem.with_suffix(".ends"))


def run(folder: Path, source: str, steps: int = FEW) -> Cost:
    (folder / "job.toml").write_text(JOB + source)
    began = time.perf_counter()
    command = [sys.executable, "-m", "forge_core", "job.toml", f"--train.steps={steps}"]
    command.append(f"--job.output={tempfile.mkdtemp(dir=folder)}")
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, status
    return Cost(time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=500_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["FORGE_CACHE"] = str(folder / "cache")
        for stem, tokens in (("small", SMALL), ("large", options.tokens)):
            write_corpus(folder / stem, tokens)
        corpora = [(stem, kind) for stem in ("small", "large") for kind in ("token file", "raw")]
        sources = {"without data": WITHOUT}
        sources |= {
            f"{stem} {kind}": {"raw": RAW, "token file": TOKEN_FILE}[kind].format(stem) for stem, kind in corpora
        }
        report(folder, sources, options.rounds)


def report(folder: Path, sources: dict[str, str], rounds: int) -> None:
    for name, source in sources.items():
        print(f"first run, {name}: {run(folder, source).wall:.1f} s", flush=True)
    costs: dict[str, list[Cost]] = {name: [] for name in sources}
    for _ in range(rounds):
        for name, source in sources.items():
            costs[name].append(run(folder, source))
    for name, found in costs.items():
        wall, cpu, _ = map(statistics.median, zip(*found, strict=True))
        pairs = list(zip(found, costs["without data"], strict=True))
        more = [statistics.median(one[i] - base[i] for one, base in pairs) for i in (0, 1)]
        peak = run(folder, sources[name], MANY).peak_mb
        compared = f"{more[0]:+.2f} s, {more[1]:+.2f} s of CPU time"
        print(f"{name}: {wall:.2f} s, {cpu:.2f} s of CPU time ({compared}); peak {peak:.0f} MB", flush=True)


if __name__ == "__main__":
    main()
