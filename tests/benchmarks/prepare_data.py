"""Tokens a second of `forge-run data prepare` against the library `tokenizers` itself, in alternating rounds.

python tests/benchmarks/prepare_data.py [--megabytes 60] [--rounds 3] [--workers 2]

Both sides encode the same texts with the same tokenizer: the .py files of the running Python, again and again, until
there are so many megabytes. The library encodes texts that lie in memory, in batches, with as many threads as the
command has workers; only its calls are timed. The command is timed as a whole, from the start of its process to its
end: it starts the workers, reads JSON lines, encodes, and writes and digests the shards.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BATCH = 256
"""Texts in a batch of the library's, 4 MB or so."""
VOCABULARY = 16384


class Cost(NamedTuple):
    """What a side took for all texts."""

    wall: float
    cpu: float
    tokens: int

    def __str__(self) -> str:
        return f"{self.tokens / self.wall:,.0f} tokens/s, {1e6 * self.cpu / self.tokens:.3f} us of CPU time a token"


def documents(megabytes: float) -> Iterator[str]:
    """The corpus."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    left = megabytes * 1e6
    while True:
        for path in files:
            text = path.read_text("utf-8", "replace")
            if "site-packages" in path.parts or not text:
                continue
            if left <= 0:
                return
            left -= len(text)
            yield text


def run_command(lines: Path, tokenizer: Path, output: Path, workers: int) -> Cost:
    options = ["--out", str(output), "--tokenizer", str(tokenizer), "--workers", str(workers)]
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "forge_core", "data", "prepare", str(lines), *options], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)  # with that of the workers, for which the command has waited
    assert status == 0, status
    train = json.loads((output / "manifest.json").read_text())["splits"]["train"]
    tokens = train["tokens"] - train["documents"]  # the library adds no end-of-text
    return Cost(time.perf_counter() - began, usage.ru_utime + usage.ru_stime, tokens)


def run_library(texts: list[str], tokenizer: Path) -> Cost:
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tokenizer))
    library.encode_special_tokens = True  # as Forge has it: special tokens spelt out in a text are text
    tokens, wall, cpu = 0, time.perf_counter(), time.process_time()
    for start in range(0, len(texts), BATCH):
        batch = library.encode_batch_fast(texts[start : start + BATCH], add_special_tokens=False)
        tokens += sum(map(len, batch))
    return Cost(time.perf_counter() - wall, time.process_time() - cpu, tokens)


def train_tokenizer(lines: Path, folder: Path) -> Path:
    """A tokenizer.json, by the command itself."""
    sample = folder / "sample.jsonl"
    sample.write_text("".join(lines.read_text().splitlines(keepends=True)[:400]))
    options = ["--out", str(folder / "sample"), "--tokenizer", "bpe", f"--tokenizer.vocab_size={VOCABULARY}"]
    command = [sys.executable, "-m", "forge_core", "data", "prepare", str(sample), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "sample/tokenizer/files/tokenizer.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    os.environ |= {"RAYON_NUM_THREADS": str(options.workers), "TOKENIZERS_PARALLELISM": "true"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["FORGE_CACHE"] = str(folder / "cache")
        texts, lines = list(documents(options.megabytes)), folder / "corpus.jsonl"
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        tokenizer = train_tokenizer(lines, folder)
        report(texts, lines, tokenizer, folder, options.rounds, options.workers)


def report(texts: list[str], lines: Path, tokenizer: Path, folder: Path, rounds: int, workers: int) -> None:
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"{len(texts)} texts, {sum(map(len, texts)) / 1e6:.0f} MB; load {load}", flush=True)
    ratios = []
    for number in range(rounds):
        library = run_library(texts, tokenizer)
        command = run_command(lines, tokenizer, folder / f"round-{number}", workers)
        assert library.tokens == command.tokens, (library, command)
        ratios.append((library.wall / command.wall, library.cpu / command.cpu))
        print(f"round {number}: library {library}; command {command}", flush=True)
    wall, cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"command / library, medians of {rounds}: {wall:.2f} of its tokens a second, {cpu:.2f} by CPU time")


if __name__ == "__main__":
    main()
