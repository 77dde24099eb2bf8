"""A thread that publishes where this rank is, and ends it when another rank has failed or the run hangs.

It wakes once a second and costs a step nothing: the main thread only notes its phase (`ProgressBeacon`).
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from types import FrameType
from typing import Any

from attrs import frozen

from forge_core.contracts.errors import ExitCode
from forge_core.launch import collectives
from forge_core.launch.failure_report import FailureReport, echo_of, emit
from forge_core.launch.progress_beacon import ProgressBeacon
from forge_core.launch.rendezvous import HEARTBEAT, Rendezvous, StoreUnresponsive

PATIENCE_S = 3.0
"""Seconds that the main thread has, once another rank has ended the run, to fail by itself: that closes loggers."""
OWN_PATIENCE_S = 30.0
"""The same where this rank is the one that failed, for hooks that handle the error."""
SILENCE_S = 5.0
"""After so long in one phase, a rank also publishes the line of code that it is at."""

Heartbeats = Mapping[int, Mapping[str, Any]]
"""By rank, what each rank published last: `number` of the heartbeat, `count`, `step` and `phase` of its position,
`idle_s` since it moved, and perhaps `detail`, `line`, `waits` and `collective`."""


@frozen
class _Snapshot:
    """The heartbeats as this rank read them, `idle_s` after it had moved last itself."""

    idle_s: float
    heartbeats: Heartbeats


class Watchdog:
    """Watches one rank of several while the run lasts.

    Args:
        rendezvous: the connection to the other ranks.
        beacon: where this rank is.
    """

    def __init__(self, rendezvous: Rendezvous, beacon: ProgressBeacon) -> None:
        self._rendezvous = rendezvous
        self._beacon = beacon
        self._limit_s = rendezvous.hang_timeout_s or math.inf
        self._main = threading.get_ident()
        self._number, self._idle_s, self._last_move = 0, 0.0, (-1, -1)
        self._earlier: _Snapshot | None = None
        self._next_look_s = self._limit_s / 2
        self._unresponsive: Sequence[int] = ()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forge-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """The run is over, or this rank ends by itself."""
        self._stopped.set()
        # The thread may be in a call to a store that does not answer; that call has a deadline, which is not awaited
        self._thread.join(timeout=2 * self._rendezvous.heartbeat_s)

    def _run(self) -> None:
        woken = time.monotonic()
        while not self._stopped.wait(self._rendezvous.heartbeat_s):
            now = time.monotonic()
            # Where much more time has passed, this process itself was stopped: that is no time in which it hung
            self._look(min(now - woken, 2 * self._rendezvous.heartbeat_s))
            woken = now

    def _look(self, seconds: float) -> None:
        move = (self._beacon.position.count, ProgressBeacon.reports)
        if move != self._last_move or move[0] == 0:  # before the first phase, ranks may wait for others to arrive
            self._idle_s, self._earlier, self._next_look_s = 0.0, None, self._limit_s / 2
        else:
            self._idle_s += seconds
        self._last_move = move
        rank, hang = self._rendezvous.world.rank, None
        try:
            self._rendezvous.set(HEARTBEAT, self._heartbeat())
            report = self._rendezvous.ending()
            if report is None and (hang := self._hang()) is not None:
                report = self._rendezvous.end(hang)
        except StoreUnresponsive as error:
            self._end(self._frozen_server(error), 0.0)
            return
        except Exception as error:  # the connection is broken, so rank 0 or torchrun's agent has ended
            self._end(self._lost_server(error), PATIENCE_S)
            return
        if report is not None and report.rank == rank:
            self._end(report, 0.0 if hang else OWN_PATIENCE_S)
        elif report is not None:
            self._end(echo_of(report, rank), PATIENCE_S)

    # --- hangs ---------------------------------------------------------------------------------------------------

    def _heartbeat(self) -> dict[str, Any]:
        position = self._beacon.position
        self._number += 1
        beat = {"number": self._number, "count": position.count, "step": position.step, "phase": position.phase}
        beat |= {"idle_s": round(self._idle_s, 1), "detail": ProgressBeacon.detail}
        if self._idle_s >= min(SILENCE_S, self._limit_s / 2):
            frame = sys._current_frames().get(self._main)
            if frame is not None:
                beat |= {"line": line_of(frame), "waits": waits_for_ranks(frame)}
            beat |= {"collective": collectives.unfinished()}
        return beat

    def _hang(self) -> FailureReport | None:
        """The report of a hang, once no rank has moved for the limit: one that waits for another rank, which saves or
        tokenizes and reports so, does not hang.

        A rank that is stopped publishes nothing, so its own `idle_s` stays small: it counts as unresponsive if its
        heartbeat is the same as in a snapshot that was taken half the limit ago.
        """
        if self._idle_s < self._next_look_s:
            return None
        world, earlier = self._rendezvous.world, self._earlier
        heartbeats = self._rendezvous.get(HEARTBEAT, range(world.size))
        if earlier is None or self._idle_s - earlier.idle_s >= self._limit_s / 4:
            self._earlier = _Snapshot(self._idle_s, heartbeats)
        silent = _silent(earlier.heartbeats, heartbeats) if earlier else []
        idle_s = min(beat["idle_s"] for rank, beat in heartbeats.items() if rank not in silent)
        # A rank that moved `idle_s` ago cannot hang before the rest of the limit has passed: with many ranks, reading
        # all heartbeats in each of them every second would be too much for the store
        self._next_look_s = max(self._limit_s, self._idle_s + self._limit_s - idle_s)
        if earlier is None or idle_s < self._limit_s:
            return None
        self._unresponsive = silent
        text = describe_hang(heartbeats, world.size, self._limit_s, silent)
        return FailureReport(rank=world.rank, code=ExitCode.FAILED, text=text, time=time.monotonic())

    def _frozen_server(self, error: Exception) -> FailureReport:
        server, world = self._rendezvous.server, self._rendezvous.world
        text = f"forge-run: the run hangs: {server} at {world.address}:{world.port} does not respond ({error})"
        return self._failure(f"{text}: its process is stopped, or its machine has gone; reported by rank {world.rank}")

    def _lost_server(self, error: Exception) -> FailureReport:
        world = self._rendezvous.world
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        text = f"forge-run: rank {world.rank}: the ranks' store at {world.address}:{world.port} does not answer"
        return self._failure(f"{text}, so {self._rendezvous.server} has gone: {cause}")

    def _failure(self, text: str) -> FailureReport:
        rank = self._rendezvous.world.rank
        return FailureReport(rank=rank, code=ExitCode.FAILED, text=text, time=time.monotonic())

    # --- the end -------------------------------------------------------------------------------------------------

    def _end(self, report: FailureReport, patience_s: float) -> None:
        """End this process, unless its main thread does so by itself in time."""
        if self._stopped.wait(patience_s):
            return
        position, log = self._beacon.position, _descriptor_of_log()
        os.write(log, f"ended in step {position.step}, {position.phase}; the stacks of all threads:\n".encode())
        faulthandler.dump_traceback(log, all_threads=True)
        emit(report)
        self._rendezvous.leave(self._unresponsive)
        os._exit(report.code)


def _silent(earlier: Heartbeats, now: Heartbeats) -> list[int]:
    """Ranks whose heartbeat stands still."""
    return [rank for rank, beat in now.items() if rank in earlier and beat["number"] == earlier[rank]["number"]]


def _descriptor_of_log() -> int:
    """Descriptor of standard error, which is the log of a rank that the command line has started."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError):  # replaced by something without one, as in a notebook
        return 2


def line_of(frame: FrameType) -> str:
    """The innermost line of code that is not the standard library's own waiting."""
    inner: FrameType | None = frame
    while inner is not None and os.path.basename(inner.f_code.co_filename) in ("threading.py", "queue.py"):
        inner = inner.f_back
    shown = inner or frame
    return f"{shown.f_code.co_filename}:{shown.f_lineno} in {shown.f_code.co_name}"


def waits_for_ranks(frame: FrameType | None) -> bool:
    """Whether a thread is inside torch.distributed, waiting for other ranks."""
    depth = 0
    while frame is not None and depth < 12:
        if f"{os.sep}torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename:
            return True
        frame, depth = frame.f_back, depth + 1
    return False


def describe_hang(heartbeats: Heartbeats, size: int, limit_s: float, silent: Collection[int] = ()) -> str:
    """Which rank is late, in which phase, and where all ranks are.

    Args:
        silent: ranks that have stopped publishing heartbeats.
    """
    absent = [rank for rank in range(size) if rank not in heartbeats]
    late = list(silent) or absent or _late(heartbeats)
    lines = [f"forge-run: the run hangs: nothing has moved for launch.hang_timeout_s = {limit_s:g} s"]
    if silent:
        lines.append(f"rank {_listed(late)} does not respond: its process is stopped, or its machine has gone")
    elif absent:
        lines.append(f"rank {_listed(absent)} is late: it has not begun")
    elif late:
        places = {f"step {heartbeats[rank]['step']}, {heartbeats[rank]['phase']}" for rank in late}
        lines.append(f"rank {_listed(late)} is late, in {' and '.join(sorted(places))}")
    else:
        lines.append(f"no rank is behind the others: {_common_activity(heartbeats)}")
    shown = sorted(heartbeats, key=lambda rank: (rank not in late, rank))[:32]
    lines += [f"  {_describe(rank, heartbeats[rank], rank in silent)}" for rank in shown]
    if len(heartbeats) > len(shown):
        lines.append(f"  and {len(heartbeats) - len(shown)} more")
    return "\n".join([*lines, "the stacks of each rank are in its log"])


def _late(heartbeats: Heartbeats) -> list[int]:
    """The ranks that have come least far; among equals, those that do not wait for others."""
    least = min(beat["count"] for beat in heartbeats.values())
    behind = [rank for rank, beat in heartbeats.items() if beat["count"] == least]
    if len(behind) < len(heartbeats):
        return sorted(behind)
    busy = [rank for rank in behind if not heartbeats[rank].get("waits", False)]
    return sorted(busy) if len(busy) < len(heartbeats) else []


def _common_activity(heartbeats: Heartbeats) -> str:
    phase = next(iter(heartbeats.values()))["phase"]
    if all(beat.get("waits") for beat in heartbeats.values()):
        return f"all wait for each other in {phase}"
    return f"all are in {phase}, and none of them waits for another; is the time too short for it?"


def _describe(rank: int, beat: Mapping[str, Any], silent: bool) -> str:
    detail = f" ({beat['detail']})" if beat.get("detail") else ""
    text = f"rank {rank}: {'last seen in ' if silent else ''}step {beat['step']}, {beat['phase']}{detail}"
    if silent:
        return text
    text += f", for {beat['idle_s']:.0f} s"
    if beat.get("waits"):
        text += ", waiting for other ranks"
    if beat.get("line"):
        text += f" at {beat['line']}"
    return text + (f", in {beat['collective']}" if beat.get("collective") else "")


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:20])) + (" …" if len(ranks) > 20 else "")
