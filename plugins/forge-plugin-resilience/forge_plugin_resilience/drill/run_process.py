"""One start of `forge-run` in a drill, and every process that belongs to it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

PR_SET_CHILD_SUBREAPER = 36
"""Option of prctl(2)."""
POLL_S = 0.02
GONE_S = 10.0
"""Seconds in which the processes of a run that has ended must be gone."""


class RunProcess:
    """A run of `forge-run`, whose output goes to a file. As a context: no process outlives it."""

    def __init__(self, files: Sequence[Path], ranks: int, log: Path) -> None:
        """Start it.

        Args:
            files: job files.
            ranks: ranks; several are started by `--nproc`.
            log: where its output goes.
        """
        self.log = log
        self.code: int | None = None
        """Exit code, negative after a signal; None while it runs, or if it did not end in time."""
        self.left: list[int] = []
        """Processes that were still there after its end, and were killed."""
        # Variables of a launcher around the drill would make the run one rank of that launcher's world
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        # The last lines before a kill are then in the log
        environment |= {"PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "forge_core", *map(str, files)]
        command += ["--nproc", str(ranks)] if ranks > 1 else []
        _adopt_orphans(True)
        # Children that this process had before are not the run's, and must not be killed with it
        self._other_children = {process.pid for process in _every_process() if process.parent == os.getpid()}
        self.began = time.time()
        with log.open("wb") as output:
            # In a separate session: the terminal's Ctrl-C reaches only the drill, which then ends all processes
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # Impatient users press Ctrl-C twice: that must wait until nothing is left
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            self.kill()
        finally:
            _adopt_orphans(False)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def wait(self, deadline: Callable[[], float], show: Callable[[], object]) -> None:
        """Wait for its end, or until the time that `deadline` returns; `show` is called a few times a second."""
        shown = 0.0
        # By the wall clock, which the records of the ranks have, and from which deadlines are made
        while (code := self._process.poll()) is None and time.time() < deadline():
            if time.time() - shown > 0.25:
                shown = time.time()
                show()
            time.sleep(POLL_S)
        self.ended, self.code = time.time(), code
        if code is not None:
            until = time.time() + GONE_S
            while (left := self._processes()) and time.time() < until:
                time.sleep(POLL_S)
            self.left = left
        self.kill()

    def kill(self) -> None:
        """Kill all its processes, stopped ones too."""
        # Until none is left: one of them may start another in the meantime
        while processes := self._processes():
            for number in processes:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            self._process.poll()
            time.sleep(POLL_S)
        if self._process.poll() is None:  # no /proc to look into
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def last_lines(self, count: int) -> str:
        """The end of its output, for people."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return "\n".join(lines[-count:])

    def _processes(self) -> list[int]:
        """Its living processes, in whatever session they are, and whichever of their parents has died."""
        # Twice if there is none: /proc is not read in one moment, and a process whose parent dies meanwhile is listed
        # below a parent that is not
        return self._descendants() or self._descendants()

    def _descendants(self) -> list[int]:
        children: dict[int, list[_Process]] = defaultdict(list)
        for process in _every_process():
            if process.pid not in self._other_children:
                children[process.parent].append(process)
        for process in children[os.getpid()]:
            # Nobody else waits for adopted orphans; the exit code of the run itself is left to `Popen`
            if process.ended and process.pid != self._process.pid:
                with suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
        living: list[int] = []
        parents = [os.getpid()]
        while parents:
            below = [process.pid for process in children[parents.pop()] if not process.ended]
            living += below
            parents += below
        return living


class _Process(NamedTuple):
    pid: int
    parent: int
    ended: bool
    """Whether it only waits for its parent to read its exit code."""


def _every_process() -> Iterator[_Process]:
    """The processes of this machine, without any where there is no /proc."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended since
            # pid (name) state parent ..., where the name may hold spaces and parentheses
            state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
            yield _Process(int(path.parent.name), int(parent), state in "ZX")


def _adopt_orphans(adopts: bool) -> None:
    """Make this process the parent of descendants whose parent dies, instead of the first process of the machine."""
    # A rank outlives its launcher, and so may what it has started: they stay below this process in /proc
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)
