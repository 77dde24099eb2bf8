"""CPU hours for a terabyte of `forge-run data filter` and `data dedup`, on synthetic pages or on files of yours.

    python tests/benchmarks/clean_documents.py [--megabytes 5] [--inputs FILE …]

Tasks run in one process, so that its CPU time is all of it: a pool's processes are not children of the command.
Documents of 400 words on average are drawn from 30,000 words by Zipf's law, with sentences and lines, so that filters
keep most. Starting, which imports spaCy, is measured with one document and subtracted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FILTERS = """
[[filter]]
type = "gopher_repetition"
[[filter]]
type = "gopher_quality"
min_stop_words = 0
[[filter]]
type = "c4_quality"
[[filter]]
type = "fineweb_quality"
"""
TABLES = {"filter": FILTERS, "dedup": '[dedup]\ntype = "minhash"\n'}
HOURS_PER_TB = 10**12 / 3600


def write_pages(path: Path, size: int) -> None:
    """Writes documents of about `size` bytes together."""
    draw = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(draw.choices(letters, weights=range(26, 0, -1), k=draw.randint(2, 9))) for _ in range(30_000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    with path.open("w") as file:
        while file.tell() < size:
            lines = []
            for _ in range(draw.randint(5, 15)):
                sentences = (draw.choices(words, weights, k=draw.randint(6, 20)) for _ in range(draw.randint(1, 5)))
                lines.append(" ".join(" ".join(sentence).capitalize() + "." for sentence in sentences))
            file.write(json.dumps({"text": "\n".join(lines)}) + "\n")


def measured(command: str, inputs: list[str], folder: Path) -> tuple[float, float]:
    """Returns seconds, and CPU seconds."""
    table = folder / "clean.toml"
    output = tempfile.mkdtemp(dir=folder) + "/out"
    head = f"inputs = {json.dumps(inputs)}\noutput = {json.dumps(output)}\ntasks = 2\nworkers = 1\n"
    table.write_text(head + TABLES[command])
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, "-m", "forge_core", "data", command, str(table)], check=True)
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure both commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=5)
    parser.add_argument("--inputs", nargs="*", default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = options.inputs or [str(folder / "pages.jsonl")]
        if not options.inputs:
            write_pages(folder / "pages.jsonl", options.megabytes * 10**6)
        write_pages(folder / "one.jsonl", 1)
        size = sum(os.path.getsize(path) for path in inputs)
        for command in TABLES:
            _, start = measured(command, [str(folder / "one.jsonl")], folder)
            seconds, cpu = measured(command, inputs, folder)
            hours = (cpu - start) / size * HOURS_PER_TB
            print(f"{command}: {size / 1e6:.1f} MB in {seconds:.0f} s, {cpu:.0f} CPU seconds ({start:.0f} to start)")
            print(f"{command}: {hours:.0f} CPU hours for 1 TB")


if __name__ == "__main__":
    main()
