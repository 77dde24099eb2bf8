"""CPU hours for a terabyte of `forge-run data filter` and `data dedup`, on synthetic pages or on files of yours.

    python tests/benchmarks/clean_documents.py [--megabytes 5] [--inputs FILE …]

All tasks run in this process, phase by phase, and its CPU time is measured: a pool's processes are not children of a
command. Documents of 400 words on average are drawn from 30,000 words by Zipf's law, with sentences and lines, so that
filters keep most. One document goes through all phases first, which imports spaCy and makes its rules.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from attrs import evolve

from forge_plugin_datatrove.dedup import dedup_work
from forge_plugin_datatrove.execution import run_locally, silence
from forge_plugin_datatrove.filtering import filter_work
from forge_plugin_datatrove.table import Table

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
TABLES = {FILTERS: filter_work, '[dedup]\ntype = "minhash"\n': dedup_work}
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


def measured(steps: str, inputs: list[str], folder: Path) -> Iterator[tuple[str, float]]:
    """Runs the phases of a table; yields the name of each, and its CPU seconds."""
    path = folder / "clean.toml"
    output = tempfile.mkdtemp(dir=folder) + "/out"
    path.write_text(f"inputs = {json.dumps(inputs)}\noutput = {json.dumps(output)}\ntasks = 2\nworkers = 1\n{steps}")
    table = Table.read(path)
    with silence():
        work = TABLES[steps](table)
    for phase in work.phases:
        before = time.process_time()
        run_locally(evolve(work, phases=[phase]), table)
        yield f"{work.name}, {phase.name}", time.process_time() - before


def main() -> None:
    """Measure the phases of both commands."""
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
        for steps in TABLES:
            # For what is done once in a process
            list(measured(steps, [str(folder / "one.jsonl")], folder))
            for phase, cpu in measured(steps, inputs, folder):
                hours = cpu / size * HOURS_PER_TB
                print(
                    f"{phase}: {size / 1e6:.1f} MB in {cpu:.1f} CPU seconds, {hours:.0f} CPU hours for 1 TB", flush=True
                )


if __name__ == "__main__":
    main()
