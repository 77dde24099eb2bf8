"""Kills `forge-run data prepare` at random moments, and sees whether the folder ends as if nobody had.

    python tests/faults/kill_prepare.py --kills 200 --folder /tmp/prepared
    python tests/faults/kill_prepare.py --kills 30 --parts 3 --folder /tmp/prepared

With `--parts`, parts and their join are killed alike, parts in any order. Exits with 1 at the first folder that
differs, which stays there.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

DOCUMENTS = 8_000
COMMAND = [sys.executable, "-m", "prepares_often", "data", "prepare", "texts", "--tokenizer=bytes", "--out=data"]
OFTEN = """
import sys

from forge_core.cli import main
from forge_plugin_memmap.prepare import inputs, run

inputs.CHUNK, run.SAVE_EVERY_S = 20_000, 0.02

if __name__ == "__main__":
    sys.exit(main())
"""
"""`forge-run` that reads and saves in small parts, as of files that take a day, so that killed commands go on."""
SMALL = ["--shard-tokens=40000", "--held-out-every=7"]
"""Many shards of each split, so that kills come between files as well as in them."""

WORKERS = (1, 2)
"""Without processes of its own, and with them; the result is the same."""
POLL_S = 0.002
SHORTEST_S = 0.05
"""Life of a command from its first saved state on, of which kills come at some share."""


def kill_at_random(folder: Path, kills: int, seed: int, say: Callable[[str], object], parts: int = 0) -> str:
    """Kill so many commands in a new `folder`; returns how a finished one differs, empty if none does.

    With `parts`, each round does that many parts in a random order, and joins them.
    """
    random = Random(seed)
    _write_texts(folder / "texts", random)
    (folder / "prepares_often.py").write_text(OFTEN)
    lives_s: dict[int, float] = {}
    for workers in WORKERS:
        shutil.rmtree(folder / "whole", ignore_errors=True)
        finished, lives_s[workers] = _finish(folder, workers)
        assert finished, "the command itself fails"
        shutil.move(folder / "data", folder / "whole")
    if parts:
        return _kill_parts(folder, kills, random, say, parts)
    expected, killed = _content(folder / "whole"), 0
    while killed < kills:
        workers = random.choice(WORKERS)
        finished, life_s = _finish(folder, workers, random.uniform(0, lives_s[workers]))
        if finished:  # one that continues has less to do, and the machine may be less busy
            lives_s[workers] = max(min(life_s, lives_s[workers]), SHORTEST_S)
        killed += not finished
        if not finished and (folder / "data/manifest.json").exists() and (folder / "data/unfinished.json").exists():
            return f"after {killed} kills data is finished and unfinished at once"
        if not finished and killed < kills:
            continue
        if not finished and not _finish(folder, workers)[0]:
            return f"after {killed} kills the same command does not go on"
        if differing := sorted(name for name, _ in expected.items() ^ _content(folder / "data").items()):
            return f"after {killed} kills of seed {seed} these files differ: {', '.join(differing)}"
        say(f"{killed:5} kills")
        shutil.rmtree(folder / "data")
    return ""


def _kill_parts(folder: Path, kills: int, random: Random, say: Callable[[str], object], parts: int) -> str:
    expected, killed = _content(folder / "whole"), 0
    lives_s: dict[str, float] = {}
    while killed < kills:
        order = [f"--part={number}/{parts}" for number in random.sample(range(1, parts + 1), parts)]
        for step in [*order, "--join"]:
            name = step.removeprefix("--part=").replace("/", "-of-")
            state = folder / ("data/unfinished.json" if step == "--join" else f"data/parts/{name}/unfinished.json")
            kind, finished = step.partition("=")[0], False
            while not finished:
                # The first of each kind lives, so that it is known how long that takes
                limit_s = random.uniform(0, 1.3 * lives_s[kind]) if kind in lives_s and killed < kills else None
                finished, life_s = _finish(folder, random.choice(WORKERS), limit_s, [step], state)
                if not finished and limit_s is None:
                    return f"after {killed} kills {step} does not go on"
                killed += not finished
                lives_s[kind] = max(lives_s.get(kind, 0.0), life_s, SHORTEST_S) if finished else lives_s[kind]
        if differing := sorted(name for name, _ in expected.items() ^ _content(folder / "data").items()):
            return f"after {killed} kills of parts and joins these files differ: {', '.join(differing)}"
        say(f"{killed:5} kills")
        shutil.rmtree(folder / "data")
    return ""


def _write_texts(folder: Path, random: Random) -> None:
    folder.mkdir(parents=True)
    for name in ("one", "two"):
        texts = ("".join(random.choices("abcdefgh ", k=random.randint(1, 400))) for _ in range(DOCUMENTS))
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text, "id": f"{name}-{n}"}) + "\n" for n, text in enumerate(texts))
        )


def _finish(
    folder: Path, workers: int, delay_s: float | None = None, more: Sequence[str] = (), state: Path | None = None
) -> tuple[bool, float]:
    """Run the command; returns whether it finished, and for how many seconds it has written.

    With `delay_s`, the command and its workers are killed so long after the first state that it saves: before, it
    starts interpreters. `more` are further arguments, and `state` is the file of the state, by default the folder's.
    """
    state = state or folder / "data/unfinished.json"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [*COMMAND, *SMALL, f"--workers={workers}", *more]
    before = _time_of(state)
    process = subprocess.Popen(command, cwd=folder, start_new_session=True, **quiet)
    while process.poll() is None and _time_of(state) == before:
        time.sleep(POLL_S)
    began = time.monotonic()
    try:
        finished = process.wait(delay_s) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        finished = False
    return finished, time.monotonic() - began


def _time_of(state: Path) -> int:
    try:
        return state.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def main() -> int:
    """Run one command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="a new folder")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other texts and kills")
    parser.add_argument("--parts", type=int, default=0, help="kill parts, and their joins; 0: one command")
    options = parser.parse_args()
    fault = kill_at_random(
        options.folder, options.kills, options.seed, lambda line: print(line, flush=True), options.parts
    )
    print(fault or f"{options.kills} kills, no difference")
    return 1 if fault else 0


if __name__ == "__main__":
    sys.exit(main())
