"""How long the parts of `data prepare` take to join, with as many documents as wanted, and CPU time of it.

python tests/benchmarks/join_parts.py [--documents 10000000] [--tokens 100] [--held-out-every 1000] [--ids]

The ids are drawn at random and written by the code that writes parts, since tokenising so many documents would take an
hour. Parts and shards lie in a temporary folder (TMPDIR), which needs some 6 bytes for each token.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from forge_core.cli import main as forge_run
from forge_plugin_memmap.prepare.encoding import Block
from forge_plugin_memmap.prepare.origin_files import Origins, OriginWriter
from forge_plugin_memmap.prepare.writing import SplitWriter, Written

PARTS = 4
AT_ONCE = 100_000
"""Documents that are drawn at a time."""
BYTES = 4
"""Of text for each token."""
ORIGINS = OriginWriter(["a.jsonl"], ("id", "origin"))


def fill(folder: Path, documents: int, mean: int, with_ids: bool, rng: np.random.Generator) -> None:
    """Put drawn documents into a finished part, of half to one and a half times `mean` tokens each."""
    record = json.loads((folder / "part.json").read_text())
    vocabulary, end = record["tokenizer"]["vocab_size"], record["tokenizer"]["end_of_text"]
    for path in folder.glob("train-*"):
        path.unlink()
    writer = SplitWriter(folder, "train", vocabulary, end, 10**8, Written(), ORIGINS, is_part=True)
    for start in range(0, documents, AT_ONCE):
        lengths = rng.integers(mean // 2, mean * 3 // 2, min(AT_ONCE, documents - start))
        ends = np.cumsum(lengths)
        ids = rng.integers(0, end, ends[-1]).astype("<u2")
        ids[ends - 1] = end
        count = len(lengths)
        # Of the two fields that are kept the first, a UUID in hexadecimal digits
        widths = np.tile([36 * with_ids, 0], (count, 1))
        texts = rng.choice(np.frombuffer(b"0123456789abcdef", np.uint8), int(widths.sum()))
        lines = np.arange(start, start + count, dtype=np.int64) + 1
        origins = Origins(np.zeros(count, np.int32), lines, widths, texts)
        writer.add(Block(ids, ends, np.append(BYTES * lengths, 0), origins))
    writer.finish()
    record["splits"]["train"] = writer.written.plain()
    (folder / "part.json").write_text(json.dumps(record))


def main() -> None:
    """Make the parts, and print the time to join them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10**7)
    parser.add_argument("--tokens", type=int, default=100, help="of a document, in the mean")
    parser.add_argument("--held-out-every", type=int, default=1000)
    parser.add_argument("--ids", action="store_true", help="documents have ids of 36 characters")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("a.jsonl").write_text('{"text": "one"}\n' * 100)
        held_out = f"--held-out-every={options.held_out_every}"
        command = ["data", "prepare", "a.jsonl", "--out=data", "--tokenizer=bytes", held_out]
        with contextlib.redirect_stdout(io.StringIO()):
            for number in range(1, PARTS + 1):
                assert forge_run([*command, "--workers=1", f"--part={number}/{PARTS}"]) == 0
                part = Path(f"data/parts/{number}-of-{PARTS}")
                fill(part, options.documents // PARTS, options.tokens, options.ids, rng)
            size = sum(path.stat().st_size for path in Path("data").rglob("*.bin"))
            # The parts were written long ago, if it is for real
            os.sync()
            began, before = time.perf_counter(), time.process_time()
            assert forge_run([*command, "--join"]) == 0
        seconds, cpu = time.perf_counter() - began, time.process_time() - before
    print(f"{options.documents:,} documents, {size / 1e9:.2f} GB of ids: {seconds:.1f} s, {cpu:.1f} s of CPU time")


if __name__ == "__main__":
    main()
