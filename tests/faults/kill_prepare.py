"""Kills `forge-run prepare-data` at random moments, and sees whether the folder ends as if nobody had.

    python tests/faults/kill_prepare.py --kills 200 --folder /tmp/prepared

Exits with 1 at the first folder that differs, which stays there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

DOCUMENTS = 4_000
COMMAND = [sys.executable, "-m", "forge_core", "prepare-data", "texts", "--tokenizer=bytes", "--output=data"]
SMALL = ["--shard-tokens=40000", "--held-out-every=7", "--workers=2"]
"""Many shards of each split, so that kills come between files as well as in them."""

START_UP = 0.3
"""Share of its life in which the command starts interpreters and has written nothing."""


def kill_at_random(folder: Path, kills: int, seed: int, say: Callable[[str], object]) -> str:
    """Kill so many commands in a new `folder`; returns how a finished one differs, empty if none does."""
    random = Random(seed)
    _write_texts(folder / "texts", random)
    began = time.monotonic()
    assert _finish(folder, None), "the command itself fails"
    life = time.monotonic() - began
    shutil.move(folder / "data", folder / "whole")
    expected, killed = _content(folder / "whole"), 0
    while killed < kills:
        began = time.monotonic()
        finished = _finish(folder, random.uniform(START_UP, 1) * life)
        if finished:  # sooner than it has lived before, as the machine is less busy
            life = time.monotonic() - began
        killed += not finished
        if not finished and (folder / "data/manifest.json").exists() and (folder / "data/unfinished.json").exists():
            return f"after {killed} kills data is finished and unfinished at once"
        if not finished and killed < kills:
            continue
        if not finished and not _finish(folder, None):
            return f"after {killed} kills the same command does not go on"
        if differing := sorted(name for name, _ in expected.items() ^ _content(folder / "data").items()):
            return f"after {killed} kills of seed {seed} these files differ: {', '.join(differing)}"
        say(f"{killed:5} kills")
        shutil.rmtree(folder / "data")
    return ""


def _write_texts(folder: Path, random: Random) -> None:
    folder.mkdir(parents=True)
    for name in ("one", "two"):
        texts = ("".join(random.choices("abcdefgh ", k=random.randint(1, 400))) for _ in range(DOCUMENTS))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def _finish(folder: Path, seconds: float | None) -> bool:
    """Run the command, and kill it and its workers after so many seconds; returns whether it ended before that."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*COMMAND, *SMALL], cwd=folder, start_new_session=True, **quiet)
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def main() -> int:
    """Run one command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="a new folder")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other texts and kills")
    options = parser.parse_args()
    fault = kill_at_random(options.folder, options.kills, options.seed, lambda line: print(line, flush=True))
    print(fault or f"{options.kills} kills, no difference")
    return 1 if fault else 0


if __name__ == "__main__":
    sys.exit(main())
