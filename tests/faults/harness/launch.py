"""One start of `forge-run`, of one rank or several, and the moment at which it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Literal

from attrs import frozen

from forge_core.checkpoint.storage import MANIFEST, UNFINISHED

RUN = Path("runs/run")
TIME_LIMIT_S = 600.0
POLL_S = 0.002
RANKS_END_S = 120.0
"""What ranks have to end once their launcher is dead."""

Moment = Literal["life", "training", "writing", "committing"]
Victims = Literal["process", "group", "a rank", "the launcher", "ranks and launcher"]
"""Whom a kill hits. Of one rank: the process alone, as the kernel does when memory is short, or its children too."""
Place = Literal["start-up", "training", "save", "end"]
PLACES: tuple[Place, ...] = ("start-up", "training", "save", "end")

MOMENTS: dict[Moment, tuple[int, float]] = {
    "life": (4, 1.0),
    "training": (2, 0.6),
    "writing": (3, 0.03),
    "committing": (3, 0.006),
}
"""How often each is chosen, and how long after it a kill may come: seconds; for `life`, the length of a whole one."""


class Interrupted(Exception):
    """The harness was asked to stop."""


@frozen(kw_only=True)
class Kill:
    """A SIGKILL, so many seconds after a moment in the life of a process."""

    moment: Moment
    """`life`: the start of the process; `training`: its first step; `writing`: the appearance of a checkpoint in the
    making; `committing`: that of its manifest, the last file before the rename, or the disappearance of all of it."""
    save: int
    """Which save of the process is meant, from 1."""
    delay_s: float
    victims: Victims
    rank: int = 0
    """Which one, where a rank is the victim."""


def draw_kill(random: Random, life_s: float, ranks: int = 1) -> Kill:
    """A kill at random; `life_s` is how long the process lives if nobody kills it."""
    moment = random.choices(list(MOMENTS), [weight for weight, _ in MOMENTS.values()])[0]
    longest = life_s * MOMENTS[moment][1] if moment == "life" else MOMENTS[moment][1]
    save, alone = random.randint(1, 3), random.random() < 0.3
    victims: Victims = "process" if alone else "group"
    if ranks > 1:
        victims = random.choice(["a rank", "a rank", "the launcher", "ranks and launcher"])
    rank, delay_s = random.randrange(ranks), random.uniform(0, longest)
    return Kill(moment=moment, save=save, delay_s=delay_s, victims=victims, rank=rank)


class Launch:
    """`forge-run job.toml` in a folder, as a process group of its own."""

    def __init__(self, folder: Path, number: int, stopping: threading.Event, ranks: int = 1) -> None:
        """Args: `number`, counts the launches in this folder, from 1; `stopping`, ends every wait, and the process;
        `ranks`, several are started by `--nproc`."""
        self.run = folder / RUN
        self._several = ranks > 1
        self._ranks: list[int] = []
        self._stopping = stopping
        self._began_ns = time.time_ns()
        self._saves: set[Path] = set()
        self._errors = folder / f"launch-{number}.err"
        environment = os.environ | {"FORGE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        with (folder / f"launch-{number}.out").open("wb") as out, self._errors.open("wb") as err:
            command = [sys.executable, "-m", "forge_core", "job.toml"]
            command += ["--nproc", str(ranks)] if self._several else []
            options: dict[str, Any] = {"cwd": folder, "env": environment, "stdin": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True, **options)

    def finish(self, kill: Kill | None) -> bool:
        """Wait until the process has ended, by itself or by `kill`; returns whether the kill came in time.

        Raises:
            Interrupted: the harness is to stop; the process is dead.
            TimeoutError: it does not end; it is dead now.
        """
        try:
            if kill is not None and self._wait_for(kill):
                self._strike(kill)
            while self._alive():
                time.sleep(POLL_S)
            self._wait_for_ranks()
        except BaseException:
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            raise
        return kill is not None and self._was_killed(kill)

    def _strike(self, kill: Kill) -> None:
        pid = self._process.pid
        if kill.victims == "group":
            os.killpg(pid, signal.SIGKILL)
            return
        victims = {"a rank": self._ranks[kill.rank :][:1] or [pid], "ranks and launcher": [*self._ranks, pid]}
        for victim in victims.get(kill.victims, [pid]):
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)

    def _was_killed(self, kill: Kill) -> bool:
        if self._process.returncode == -signal.SIGKILL:
            return True
        return kill.victims == "a rank" and self._process.returncode == 1 and "killed by SIGKILL" in self._told()

    def _wait_for_ranks(self) -> None:
        """Nobody ends them here: they are to end by themselves when their launcher is dead."""
        until = time.monotonic() + RANKS_END_S
        while left := [rank for rank in self._ranks if _runs(rank)]:
            if time.monotonic() > until:
                raise TimeoutError(f"ranks {left} outlived their launcher by {RANKS_END_S:.0f} s")
            time.sleep(POLL_S)

    def records(self) -> list[dict[str, Any]]:
        """What the hook `Seen` of this process, or of its ranks, wrote, in order."""
        path = self.run / "seen.jsonl"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [record for record in found if record["process"] in (self._process.pid, *self._ranks)]

    def place(self, steps: int) -> Place:
        """Where in its work the process died; `steps` is the length of the run."""
        records = self.records()
        if any(self._unfinished()):
            return "save"
        if not records:
            return "start-up"
        return "end" if steps in committed(self.run) else "training"

    def failure(self) -> str:
        """The exit code and the errors of a process that did not finish its run; else nothing."""
        if self._process.returncode == 0:
            return ""
        return f"exit code {self._process.returncode}: {self._told()[-700:].strip()}"

    def _told(self) -> str:
        return self._errors.read_text()

    def _wait_for(self, kill: Kill) -> bool:
        """Whether the moment came, and the time after it, while the process lived."""
        while not self._reached(kill):
            if not self._alive():
                return False
            time.sleep(POLL_S / 4 if self._saves else POLL_S)
        until = time.monotonic() + kill.delay_s
        while self._alive() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))
        return self._process.returncode is None

    def _reached(self, kill: Kill) -> bool:
        if kill.moment == "life":
            return True
        if kill.moment == "training":
            return bool(self.records())
        now = list(self._unfinished())
        self._saves.update(now)
        if len(self._saves) < kill.save:
            return False
        return kill.moment == "writing" or not now or any((path / MANIFEST).exists() for path in now)

    def _alive(self) -> bool:
        if self._stopping.is_set():
            raise Interrupted
        if time.time_ns() - self._began_ns > TIME_LIMIT_S * 1e9:
            raise TimeoutError(f"a process did not end within {TIME_LIMIT_S:.0f} s")
        if self._several:
            self._ranks = _children(self._process.pid) or self._ranks
        return self._process.poll() is None

    def _unfinished(self) -> Iterator[Path]:
        """Checkpoints that this process is writing, or deleting."""
        for path in (self.run / "checkpoints").glob(f"step-*{UNFINISHED}"):
            try:
                if path.stat().st_ctime_ns >= self._began_ns:
                    yield path
            except FileNotFoundError:
                continue  # committed meanwhile


def _children(pid: int) -> list[int]:
    """Processes that a process has started, in order; none if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return [int(number) for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _runs(pid: int) -> bool:
    """Whether a process lives; a zombie does not."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def committed(run: Path) -> list[int]:
    """Steps that have a checkpoint under its final name, in order."""
    names = [path.name.removeprefix("step-") for path in (run / "checkpoints").glob("step-*")]
    return sorted(int(name) for name in names if name.isdigit())
