"""Starts the ranks of a run on this machine, passes requests to stop on, and ends them all when one fails.

Our own rather than torch's elastic agent, which kills after a fixed 30 s, replaces exit codes by its own, and does not
pass SIGUSR1 on. Ranks are not forks, in which threads and CUDA contexts of plugins would break. A socket to each rank
carries requests to stop, and its failure report back, even before the ranks have their store and after rank 0, which
serves it, has died. When this process dies, the sockets close and the ranks end.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

from attrs import define, evolve, frozen

from forge_core.checkpoint.run_folder import LOCK, RunFolder
from forge_core.contracts.errors import ExitCode, JobError, listed
from forge_core.contracts.run_end import Cause, End
from forge_core.launch.failure_report import FailureReport
from forge_core.launch.stop_requests import STOP_SIGNALS, StopRequests
from forge_core.launch.world import ALIVE, CONTROL, LISTENING
from forge_kit.tools.control_group import MemoryGroup
from forge_kit.tools.run_owner import owner

POLL_S = 0.05
SIMULTANEOUS_S = 0.3
"""The first to fail is looked for among the ranks that fail within this time."""
FAREWELL_S = 4.0
"""Seconds that the ranks have, once one has failed, to write down where they are: more than the watchdogs' patience."""

LOST = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""A rank that died of one of these is the cause of other ranks' reports. Not SIGABRT: torch aborts for their sake."""


Popen = Callable[..., subprocess.Popen]


@frozen(kw_only=True)
class Node:
    """This machine in a run of several, which have equally many ranks and a launcher each."""

    number: int = 0
    """From 0; the first rank of node 0 is rank 0."""
    count: int = 1
    address: str = "127.0.0.1"
    """Host of node 0, where the ranks meet."""
    port: int = 0
    """Port of node 0; 0: a free one, which only a single node can know."""

    def listener(self) -> socket.socket:
        """Returns the socket at which rank 0 serves the others; a `JobError` if it cannot be opened here."""
        # On one machine nobody else may connect: the store has no secret
        host = "127.0.0.1" if self.count == 1 else ""
        try:
            # A backlog for all ranks, which may connect before rank 0 accepts
            return socket.create_server((host, self.port), backlog=4096)
        except OSError as error:
            hint = "pass another --port to the launchers of all nodes"
            raise JobError(f"--port={self.port}: rank 0 cannot listen there: {error}; {hint}") from None


@define
class RankHandle:
    """A rank that was started."""

    rank: int
    process: subprocess.Popen
    control: socket.socket
    report: FailureReport | None = None
    has_finished: bool = False
    """Whether it has done its work, so that only its exit is left."""
    heard: float = 0.0
    """When it sent something last, on the monotonic clock."""
    _received: bytes = b""

    @property
    def code(self) -> int | None:
        """Its exit code at the last poll; None while it runs, negative if it died of a signal."""
        return self.process.returncode

    @property
    def failed(self) -> bool:
        """Whether it ended before it had finished or saved; exit code 0 alone does not show that it had finished."""
        if self.code == ExitCode.FINISHED:
            return not self.has_finished  # `os._exit(0)`, in a hook or a library
        return self.code not in (None, ExitCode.STOPPED)

    def poll(self) -> int | None:
        """Its exit code, and take what it has sent; the processes of a rank that has failed are ended with it."""
        if self.process.returncode is None and not _exited_well(self.process.pid):
            with suppress(ProcessLookupError):  # before its number is free for another process
                os.killpg(self.process.pid, signal.SIGKILL)
        # Before `_receive`: once it has ended, all that it sent can be received
        code = self.process.poll()
        self._receive()
        return code

    def _receive(self) -> None:
        # It ends with BlockingIOError when all is read, or with the connection of a rank that is gone
        with suppress(OSError):
            while data := self.control.recv(1 << 16, socket.MSG_DONTWAIT):
                self.heard = time.monotonic()
                self._received += data
        self.has_finished = self.has_finished or self._received.startswith(ALIVE)
        line, newline, rest = self._received.lstrip(ALIVE).partition(b"\n")
        if newline and self.report is None:
            self.report = FailureReport.from_json(line)
        self._received = rest if newline else line


class Ended(NamedTuple):
    """How a run of several ranks came to its end."""

    code: int
    message: str = ""
    """For a person, beyond what rank 0 has printed."""
    end: End | None = None
    """For the run folder; None where rank 0 has written it."""
    is_echo: bool = False
    """Whether a rank of another node was the first to fail."""


def run_ranks(
    command: Sequence[str], ranks: int, logs: Path, grace_s: float, silence_s: float = 0.0, node: Node | None = None
) -> int:
    """Run one command as several ranks, print why they failed, return the exit code; arguments as of `Supervisor`."""
    ended = Supervisor(command, ranks, logs, grace_s, silence_s, node=node).run()
    if ended.message:
        print(ended.message, file=sys.stderr, flush=True)
    return ended.code


class Supervisor:
    """Runs one command as several ranks, which keep logs in `logs`.

    After a request to stop they have `grace_s` seconds to end; 0: as many as they need. Once one has finished, the
    others may be silent for `silence_s` seconds; 0: for ever. `popen` starts a rank. In a run on several nodes, `ranks`
    counts one node's: when a rank fails on another, the ranks here end by themselves, with its exit code.
    """

    def __init__(
        self,
        command: Sequence[str],
        ranks: int,
        logs: Path,
        grace_s: float,
        silence_s: float = 0.0,
        *,
        popen: Popen = subprocess.Popen,
        node: Node | None = None,
    ) -> None:
        self._command, self._count, self._logs, self._popen = command, ranks, logs, popen
        self._node = node or Node()
        self._grace_s, self._silence_s = grace_s, silence_s
        self._finished_at: float | None = None
        """When the first rank ended well, on the monotonic clock."""
        self._ranks: list[RankHandle] = []
        self._second_signal = threading.Event()
        self._asked: int | None = None
        self._asked_at = 0.0
        # Counted before the ranks start, since processes of earlier runs may have been killed in the same group
        self._kills = MemoryGroup().kills()

    def run(self) -> Ended:
        """Start the ranks and wait until all have ended."""
        # From before the first rank starts until the last has ended: no signal may end this process and leave ranks
        with closing(StopRequests(self._ask_all, on_second=self._second_signal.set)):
            began = time.time()
            try:
                self._start()
                ended = self._wait()
            finally:
                self._kill()
        run = RunFolder(self._logs.parent)
        # What another node has ended is recorded there
        if ended.end is not None and not ended.is_echo:
            _record(run, ended.end, began)
            if self._node.count > 1 and ended.end.cause is Cause.FAILED and (killed := _killed_elsewhere(run, began)):
                cause = f"the cause, on {killed.host}: {killed.reason}"
                return ended._replace(message=f"{ended.message}\nforge-run: {cause}")
        return ended

    def _start(self) -> None:
        # The socket is bound here and rank 0 inherits it, so no other process can take the port in between
        with self._node.listener() if self._node.number == 0 else nullcontext() as listener:
            port = listener.getsockname()[1] if listener else self._node.port
            for local_rank in range(self._count):
                self._ranks.append(self._spawn(local_rank, port, listener))
        if self._asked is not None:  # meanwhile, when not all ranks could be asked
            self._ask_all(self._asked)

    def _spawn(self, local_rank: int, port: int, listener: socket.socket | None) -> RankHandle:
        ours, theirs = socket.socketpair()
        rank = self._node.number * self._count + local_rank
        sockets = {CONTROL: theirs, LISTENING: listener} if listener and rank == 0 else {CONTROL: theirs}
        variables = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self._node.count * self._count,
            "LOCAL_WORLD_SIZE": self._count,
            "MASTER_ADDR": self._node.address,
            "MASTER_PORT": port,
            **{name: end.fileno() for name, end in sockets.items()},
        }
        threads = max(1, len(os.sched_getaffinity(0)) // self._count)  # torch would take all cores in each rank
        # The environment comes last: a value that the user has set has precedence
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        environment |= {name: str(value) for name, value in variables.items()}
        with theirs:  # our copy of it is closed at once: only then does a dead rank close the connection
            process = self._popen(
                self._command,
                env=environment,
                pass_fds=[end.fileno() for end in sockets.values()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C comes to this process only, which passes it on
            )
        return RankHandle(rank, process, ours)

    def _wait(self) -> Ended:
        while None in self._poll():
            if self._second_signal.is_set():
                return _at_once()
            if any(rank.failed for rank in self._ranks):
                return self._failed()
            if late := self._too_late() or self._silent():
                return late
            if self._asked is None and any(rank.code == ExitCode.STOPPED for rank in self._ranks):
                self._ask_all(signal.SIGTERM)  # that one could not tell the others
            time.sleep(POLL_S)
        if any(rank.failed for rank in self._ranks):  # all at once, between two polls
            return self._failed()
        # Only FINISHED and STOPPED are left here; a single rank that stopped means that the run is not finished
        return Ended(max(rank.code or 0 for rank in self._ranks))

    def _poll(self) -> list[int | None]:
        return [rank.poll() for rank in self._ranks]

    def _failed(self) -> Ended:
        """Let the other ranks write down where they are, end them, and report the one that failed first."""
        # The rank that ended first need not be the cause: it may have lost the connection to another one
        time.sleep(SIMULTANEOUS_S)
        self._poll()
        first = min((rank for rank in self._ranks if rank.failed or rank.report is not None), key=_order)
        in_hang = first.report is not None and first.report.hang  # main threads have nothing more to do then
        deadline = time.monotonic() + (FAREWELL_S / 2 if in_hang else FAREWELL_S)
        while None in self._poll() and time.monotonic() < deadline and not self._second_signal.is_set():
            time.sleep(POLL_S)
        ended = _ended_by(first, self._kills)
        if self._node.count > 1 and first.report is not None and first.report.echo:
            ended = ended._replace(is_echo=True)
        if ended.message and ended.code != ExitCode.BAD_JOB and self._logs.is_dir():
            return ended._replace(message=f"{ended.message}\nlogs of all ranks: {self._logs}")
        return ended

    def _ask_all(self, number: int) -> None:
        # By the socket: it is no second signal if it comes twice, and a rank that does not listen yet finds it later
        if self._asked is None:
            self._asked, self._asked_at = number, time.monotonic()
        for rank in self._ranks:
            # A rank that has ended has closed its side, and needs no request
            with suppress(OSError):
                rank.control.send(bytes([number]))

    def _too_late(self) -> Ended | None:
        """The end of a run whose ranks have had their time to stop; None before."""
        if not self._grace_s or self._asked is None or time.monotonic() - self._asked_at < self._grace_s:
            return None
        slow = [rank.rank for rank in self._ranks if rank.code is None]
        named = ", ".join(map(str, slow))
        text = f"rank {named} did not stop within launch.grace_s = {self._grace_s:g} s and was killed"
        end = End(code=ExitCode.FAILED, cause=Cause.KILLED, reason=text, rank=slow[0])
        return Ended(ExitCode.FAILED, f"forge-run: {text}; the last checkpoint is intact", end)

    def _silent(self) -> Ended | None:
        """The end of a run of which a rank has finished while another gives no sign of life; None if all do.

        Ranks leave training together, so all that is left to a rank then is its exit. Until then they watch each other.
        """
        if not self._silence_s or not any(rank.has_finished and rank.code is not None for rank in self._ranks):
            return None
        now = time.monotonic()
        self._finished_at = self._finished_at or now
        last_signs = {rank.rank: max(rank.heard, self._finished_at) for rank in self._ranks if rank.code is None}
        silent = [rank for rank, heard in last_signs.items() if now - heard > self._silence_s]
        if not silent:
            return None
        limit = f"{self._silence_s:g} s (launch.silence_timeout_s)"
        text = f"rank {listed(silent)} does not exit after the end of the run, and gave no sign of life for {limit}"
        text += ": its process is stopped or stuck, and was killed"
        end = End(code=ExitCode.FAILED, cause=Cause.HANG, reason=text, rank=silent[0])
        return Ended(ExitCode.FAILED, f"forge-run: {text}", end)

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, signal.SIGKILL)  # with its data workers
        for rank in self._ranks:
            # In a second loop, so that all are killed before any is waited for
            rank.process.wait()
            rank.control.close()


def _exited_well(process: int) -> bool:
    """Whether a child still runs, or has ended as a rank that has finished or saved does; it stays a zombie."""
    ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return True
    return ended.si_code == os.CLD_EXITED and ended.si_status in (ExitCode.FINISHED, ExitCode.STOPPED)


def _order(rank: RankHandle) -> tuple[int, float]:
    """Sort key, smallest for the cause: a rank that is lost comes before errors, which may be the lost connection."""
    if rank.report is not None:
        return (3 if rank.report.echo else 1, rank.report.time)
    assert rank.code is not None
    return (0 if rank.code >= 0 or -rank.code in LOST else 2, 0.0)


def _ended_by(first: RankHandle, kills: int) -> Ended:
    if first.report is not None:
        return Ended(first.report.code, first.report.text, first.report.end())
    assert first.code is not None
    if first.code == ExitCode.SECOND_SIGNAL:
        return _at_once()
    if -first.code in STOP_SIGNALS:  # it was not listening yet, so there is nothing to save
        name = signal.Signals(-first.code).name
        reason = f"stopped by {name} before training began"
        end = End(code=ExitCode.STOPPED, cause=Cause.SIGNAL, signal=name, reason=reason, rank=first.rank)
        return Ended(ExitCode.STOPPED, end=end)
    cause = f"left with exit code {first.code} and without a report"
    if first.code == ExitCode.FINISHED:
        cause += ", before its work was done (`os._exit` in a hook or a library?)"
    if first.code < 0:
        cause = f"was killed by {signal.Signals(-first.code).name}"
        cause += f": {_memory_words(kills)}" if first.code == -signal.SIGKILL else ""
    reason = f"rank {first.rank} {cause}"
    end = End(code=ExitCode.FAILED, cause=Cause.KILLED, reason=reason, rank=first.rank)
    return Ended(ExitCode.FAILED, f"forge-run: {reason}; the other ranks were ended", end)


def _at_once() -> Ended:
    reason = "ended at once by a second signal, without a save"
    return Ended(ExitCode.SECOND_SIGNAL, end=End(code=ExitCode.SECOND_SIGNAL, cause=Cause.SIGNAL, reason=reason))


def _record(run: RunFolder, end: End, began: float) -> None:
    """Keep the end in the run folder, unless the ranks never took it, or another run has it now."""
    before = run.end()
    if not (run.path / LOCK).is_file() or owner(run.path) or (before is not None and before.ended < began):
        return
    # A kill is certain for the launcher of its node, and here only a lost connection
    if before is not None and before.cause is Cause.KILLED and end.cause is not Cause.KILLED:
        return
    # Ranks that lost their connection to this one may have been quicker
    if before is None or (before.rank, before.code, before.cause) != (end.rank, end.code, end.cause):
        if before is not None:
            end = evolve(end, step=before.step, started=before.started)
        # What ended the run may keep this from being written, too, such as a full disk
        with suppress(OSError):
            run.write_end(end, supersede=True)


def _killed_elsewhere(run: RunFolder, began: float) -> End | None:
    """The kill of a rank on another node, whose launcher records it; None if there is none within its time for that.

    The error of a rank here is then only a lost connection.
    """
    deadline = time.monotonic() + FAREWELL_S
    while (run.path / LOCK).is_file():
        end = run.end()
        if end is not None and end.cause is Cause.KILLED and end.ended >= began:
            return end
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_S)
    return None


def _memory_words(kills: int) -> str:
    """Whether memory was the cause of a SIGKILL; `kills` are those for lack of memory from before the run."""
    group = MemoryGroup()
    if group.kills() <= kills:
        return "the machine may be short of memory"
    limit = f", {group.limit() / 1e9:.1f} GB" if group.limit() else ""
    return f"memory ran out within the limit of its control group{limit} (Linux's OOM killer)"
