"""A thread that publishes where this rank is, and ends it when another rank has failed or the run hangs."""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from attrs import asdict

from forge_core.contracts.errors import listed
from forge_core.launch.failure_report import EndedElsewhere, FailureReport, report_of
from forge_core.launch.progress_beacon import ProgressBeacon
from forge_core.launch.rendezvous import HEARTBEAT, Rendezvous, StoreUnresponsive

PATIENCE_S = 3.0
"""Seconds that the main thread has, once another rank has ended the run, to fail by itself: that closes loggers."""
OWN_PATIENCE_S = 30.0
"""The same where this rank is the one that failed, for hooks that handle the error."""
SILENCE_S = 5.0
"""After this many seconds without a move, a rank also publishes the line of code that it is at."""
RECORDERS = {"gloo": "_dump_fr_trace_json", "NCCL": "_dump_nccl_trace_json"}
"""The function of torch's flight recorder for each library; which of them exist depends on how torch was built."""

Heartbeats = Mapping[int, Mapping[str, Any]]
"""By rank, without those that have published none, as `Watchdog._heartbeat` makes them."""


class Watchdog:
    """Watches one rank of several until `stop`; `emit` shows why the rank ends.

    Its thread wakes once a second and costs a step nothing: the main thread only notes its phase in `beacon`.
    """

    def __init__(self, rendezvous: Rendezvous, beacon: ProgressBeacon, emit: Callable[[FailureReport], object]) -> None:
        self._rendezvous, self._beacon, self._emit = rendezvous, beacon, emit
        self._limit_s = rendezvous.hang_timeout_s or math.inf
        self._main = threading.get_ident()
        self._number, self._idle_s, self._last_move = 0, 0.0, (-1, -1)
        self._earlier: tuple[float, Heartbeats] | None = None
        """An earlier reading of the heartbeats, and how long this rank had not moved by then."""
        self._next_look_s = self._limit_s / 2
        self._unresponsive: Sequence[int] = ()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forge-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching: the run is over, or this rank ends by itself."""
        self._stopped.set()
        self._thread.join(timeout=2 * self._rendezvous.heartbeat_s)  # the thread may wait for the store

    def _run(self) -> None:
        woken = time.monotonic()
        while not self._stopped.wait(self._rendezvous.heartbeat_s):
            now, move = time.monotonic(), (self._beacon.position.count, ProgressBeacon.reports)
            if move != self._last_move or move[0] == 0:  # before the first phase, ranks may wait for others to arrive
                self._idle_s, self._earlier, self._next_look_s = 0.0, None, self._limit_s / 2
            else:  # if much more time has passed, this process itself was stopped: that is no time in which it hung
                self._idle_s += min(now - woken, 2 * self._rendezvous.heartbeat_s)
            self._last_move, woken = move, now
            self._look()

    def _look(self) -> None:
        rank, hang = self._rendezvous.world.rank, None
        try:  # each call may take the whole limit when the server of the store is stopped
            self._rendezvous.set(HEARTBEAT, self._heartbeat())
            report = self._rendezvous.ending()
            if report is None and (hang := self._hang()) is not None:
                report = self._rendezvous.end(hang)
        except Exception as error:
            self._end(self._store_failure(error), 0.0 if isinstance(error, StoreUnresponsive) else PATIENCE_S)
            return
        if report is not None and report.rank == rank:
            self._end(report, 0.0 if hang else OWN_PATIENCE_S)  # in a hang, the main thread cannot end by itself
        elif report is not None:
            self._end(report_of(rank, EndedElsewhere(report)), PATIENCE_S)

    def _store_failure(self, error: Exception) -> FailureReport:
        server, world = self._rendezvous.server, self._rendezvous.world
        rank, address = world.rank, f"{world.address}:{world.port}"
        if isinstance(error, StoreUnresponsive):
            text = f"forge-run: the run hangs: {server} at {address} does not respond ({error})"
            text += f": its process is stopped, or its machine has gone; reported by rank {rank}"
        else:
            cause = str(error).splitlines()[0] if str(error) else type(error).__name__
            text = f"forge-run: rank {rank}: the ranks' store at {address} does not answer"
            text += f", so {server} has gone: {cause}"
        return FailureReport(rank=rank, text=text)

    def _heartbeat(self) -> dict[str, Any]:
        self._number += 1
        beat = {"number": self._number, **asdict(self._beacon.position)}
        beat |= {"idle_s": round(self._idle_s, 1), "detail": ProgressBeacon.detail}
        # Only of a rank that stands still: stack and flight recorder cost more than the rest, every second
        if self._idle_s >= min(SILENCE_S, self._limit_s / 2):
            if (frame := sys._current_frames().get(self._main)) is not None:
                beat |= {"line": line_of(frame), "waits": waits_for_ranks(frame)}
            beat["collective"] = unfinished_collectives()
        return beat

    def _hang(self) -> FailureReport | None:
        """The report of a hang, once no rank has moved for the limit: not if one saves or tokenizes, and others wait.

        A rank that is stopped publishes nothing, so its own `idle_s` stays small: it counts as unresponsive if its
        heartbeat is the same as in a reading that was taken half the limit ago.
        """
        if self._idle_s < self._next_look_s:
            return None
        size, earlier, silent = self._rendezvous.world.size, self._earlier, []
        heartbeats = self._rendezvous.get(HEARTBEAT, range(size))
        if earlier is None or self._idle_s - earlier[0] >= self._limit_s / 4:
            self._earlier = (self._idle_s, heartbeats)
        if earlier is not None:
            numbers = {rank: beat["number"] for rank, beat in earlier[1].items()}
            silent = [rank for rank, beat in heartbeats.items() if beat["number"] == numbers.get(rank)]
        idle_s = min(beat["idle_s"] for rank, beat in heartbeats.items() if rank not in silent)
        # No hang is possible before; and the store could not show many ranks the heartbeats of all every second
        self._next_look_s = max(self._limit_s, self._idle_s + self._limit_s - idle_s)
        if earlier is None or idle_s < self._limit_s:
            return None
        self._unresponsive = silent
        text = describe_hang(heartbeats, size, self._limit_s, silent)
        return FailureReport(rank=self._rendezvous.world.rank, text=text)

    def _end(self, report: FailureReport, patience_s: float) -> None:
        """End this process, unless its main thread does so by itself in time."""
        if self._stopped.wait(patience_s):
            return
        position, log = self._beacon.position, _descriptor_of_log()
        # By descriptor, and first: the main thread may hold the locks of Python's streams
        os.write(log, f"ended in step {position.step}, {position.phase}; the stacks of all threads:\n".encode())
        faulthandler.dump_traceback(log, all_threads=True)
        self._emit(report)
        self._rendezvous.leave(self._unresponsive)  # last: rank 0 waits here until the others know why the run ends
        os._exit(report.code)


def _descriptor_of_log() -> int:
    """The descriptor of standard error, which `RankLog` makes the log's."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError):  # as in a notebook
        return 2


def line_of(frame: FrameType) -> str:
    """The innermost line of code that is not the standard library's own waiting."""
    waiting = ("threading.py", "queue.py")
    frames = (inner for inner, _ in walk_stack(frame) if os.path.basename(inner.f_code.co_filename) not in waiting)
    inner = next(frames, frame)
    return f"{inner.f_code.co_filename}:{inner.f_lineno} in {inner.f_code.co_name}"


def waits_for_ranks(frame: FrameType) -> bool:
    """Whether a thread is inside torch.distributed, waiting for other ranks."""
    # Some frames deep only: schedules of pipelines and hooks of FSDP, which call a model, are in torch.distributed too
    package = f"{os.sep}torch{os.sep}distributed{os.sep}"
    return any(package in inner.f_code.co_filename for inner, _ in islice(walk_stack(frame), 12))


def unfinished_collectives() -> str:
    """The oldest unfinished collective of each library, in words; none where torch's flight recorder is off."""
    oldest = []
    for library, name in RECORDERS.items():
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is None or (library == "NCCL" and not torch.cuda.is_initialized()):
            continue
        try:
            oldest.append(oldest_unfinished(json.loads(dump(includeCollectives=True, onlyActive=False))))
        except (RuntimeError, TypeError, ValueError) as error:  # private functions, whose arguments may change
            oldest.append(f"a {library} collective without a readable record ({type(error).__name__}: {error})")
    return ", ".join(filter(None, oldest))


def oldest_unfinished(record: Mapping[str, Any]) -> str:
    """The first, so the oldest, of the recorder's `entries` that is not completed, in words; empty if there is none."""
    for entry in record.get("entries", ()):
        if entry.get("state") != "completed" and not entry.get("retired"):
            group = " ".join(str(part) for part in entry.get("process_group", ()))
            name, number = entry.get("profiling_name", "?"), entry.get("collective_seq_id", "?")
            return f"{name} number {number} of group {group} over {entry.get('input_sizes', '?')}"
    return ""


def describe_hang(heartbeats: Heartbeats, size: int, limit_s: float, silent: Collection[int] = ()) -> str:
    """Which of `size` ranks is late, in which phase, and where all are; `silent` ones have stopped publishing."""
    absent = [rank for rank in range(size) if rank not in heartbeats]
    late = list(silent) or absent or _late(heartbeats)
    phase = next((beat["phase"] for beat in heartbeats.values()), "")
    lines = [f"forge-run: the run hangs: nothing has moved for launch.hang_timeout_s = {limit_s:g} s"]
    if silent:
        lines.append(f"rank {listed(late)} does not respond: its process is stopped, or its machine has gone")
    elif absent:
        lines.append(f"rank {listed(absent)} is late: it has not begun")
    elif late:
        places = {f"step {heartbeats[rank]['step']}, {heartbeats[rank]['phase']}" for rank in late}
        lines.append(f"rank {listed(late)} is late, in {' and '.join(sorted(places))}")
    elif all(beat.get("waits") for beat in heartbeats.values()):
        lines.append(f"no rank is behind the others: all wait for each other in {phase}")
    else:
        question = "and none of them waits for another; is the time too short for it?"
        lines.append(f"no rank is behind the others: all are in {phase}, {question}")
    shown = sorted(heartbeats, key=lambda rank: (rank not in late, rank))[:32]
    lines += [f"  {_describe(rank, heartbeats[rank], rank in silent)}" for rank in shown]
    if len(heartbeats) > len(shown):
        lines.append(f"  and {len(heartbeats) - len(shown)} more")
    return "\n".join([*lines, "the stacks of each rank are in its log"])


def _late(heartbeats: Heartbeats) -> list[int]:
    """The ranks that have entered the fewest phases; among equals, those that do not wait for others."""
    least = min(beat["count"] for beat in heartbeats.values())
    behind = [rank for rank, beat in heartbeats.items() if beat["count"] == least]
    if len(behind) < len(heartbeats):
        return sorted(behind)
    busy = [rank for rank in behind if not heartbeats[rank].get("waits", False)]
    return sorted(busy) if len(busy) < len(heartbeats) else []


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
