"""A thread that publishes where this rank is, and ends it when another rank has failed or the run hangs."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch

from forge_core.contracts.errors import listed
from forge_core.contracts.phase import COMPUTING
from forge_core.launch.failure_report import EndedElsewhere, FailureReport, report_of
from forge_core.launch.progress_beacon import ProgressBeacon
from forge_core.launch.rendezvous import HEARTBEAT, Rendezvous, StoreUnresponsive, call_within

PATIENCE_S = 3.0
"""Seconds that the main thread has, once another rank has ended the run, to fail by itself: that closes loggers."""
OWN_PATIENCE_S = 30.0
"""The same where this rank is the one that failed, for hooks that handle the error."""
SILENCE_S = 5.0
"""After this many seconds without a move, a rank also publishes the line of code that it is at."""
WRITING_S = 2.0
"""Seconds for the stacks of a rank that hangs: the disk of its log may be what it waits for."""
LEAST_S = 30.0
"""Limits that are learnt from the run are never shorter."""
WARM_UP = 5
"""A phase has its own limit from its fifth occurrence on."""
START_FACTOR = 10
"""Heartbeats may stand still for this much longer before the first step: reading data may keep Python's lock."""
COMPILERS = (
    *("convert_frame.py", "compile_fx.py", "compiler.py", "autotuner.py", "triton_heuristics.py"),
    "<frozen importlib._bootstrap>",  # which imports what they need
)
"""Files of torch and Triton that compile, in functions whose names say so; they are on the stack at other times too."""
BUSY = ("compile", "bench", "autotune", "load")
RECORDERS = {"gloo": "_dump_fr_trace_json", "NCCL": "_dump_nccl_trace_json"}
"""The function of torch's flight recorder for each library; which of them exist depends on how torch was built."""

Heartbeats = Mapping[int, Mapping[str, Any]]
"""By rank, without those that have published none, as `Watchdog._heartbeat` makes them."""


class Watchdog:
    """Watches one rank of several until `stop`; `emit` shows why the rank ends.

    Its thread wakes once a second and costs a step nothing: the main thread only notes its phase in `beacon`. Each rank
    looks for a hang of all, and for silence of the next rank, so that the store answers few questions. `factor` is
    `launch.hang_factor`.
    """

    def __init__(
        self, rendezvous: Rendezvous, beacon: ProgressBeacon, emit: Callable[[FailureReport], object], factor: float = 0
    ) -> None:
        self._rendezvous, self._beacon, self._emit, self._factor = rendezvous, beacon, emit, factor
        self._limit_s = rendezvous.hang_timeout_s or float("inf")
        self._main, self._host = threading.get_ident(), socket.gethostname()
        self._number, self._last_move, self._phase = 0, (-1, -1), ""
        self._collective: str | None = None
        """The oldest collective that had not ended at the last look; None: this rank had moved."""
        self._idle_s = 0.0
        """Seconds since this rank moved."""
        self._still_s = 0.0
        """The part of them, up to now, in which it only computed or waited, and no collective ended."""
        self._longest: dict[str, float] = {}
        """The longest such time in each phase, without the first occurrence, in which everything is slow."""
        self._left_s, self._next_look_s = self._limit_s, 0.0
        self._ages: dict[int, tuple[int, float]] = {}
        """Number of the last heartbeat of each watched rank, and for how long it has been the last."""
        self._silent: Sequence[int] = ()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forge-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching: the run is over, or this rank ends by itself."""
        self._stopped.set()
        self._thread.join(timeout=2 * self._rendezvous.heartbeat_s)  # the thread may wait for the store

    def _run(self) -> None:
        self._look(0.0)  # at once: a rank that was never heard of cannot fall silent
        woken = time.monotonic()
        while not self._stopped.wait(self._rendezvous.heartbeat_s):
            now = time.monotonic()
            # If much more time has passed, this process itself was stopped: that is no time in which a rank hung
            passed_s, woken = min(now - woken, 2 * self._rendezvous.heartbeat_s), now
            self._look(passed_s)
        with suppress(Exception):  # a rank that nobody watches any more is not silent
            self._rendezvous.set(HEARTBEAT, {"number": 0})

    def _look(self, passed_s: float) -> None:
        rank = self._rendezvous.world.rank
        try:  # each call may take `silence_s` when the server of the store is stopped
            self._rendezvous.set(HEARTBEAT, self._heartbeat(passed_s))
            report = self._rendezvous.ending()
            if report is None and (hang := self._silence(passed_s) or self._hang()):
                report = self._rendezvous.end(hang)
        except Exception as error:
            report = self._store_failure(error)
            self._end(report, 0.0 if report.hang else PATIENCE_S)
            return
        if report is not None:
            patience_s = 0.0 if report.hang else OWN_PATIENCE_S if report.rank == rank else PATIENCE_S
            self._end(report if report.rank == rank else report_of(rank, EndedElsewhere(report)), patience_s)

    def _store_failure(self, error: Exception) -> FailureReport:
        world, hang = self._rendezvous.world, isinstance(error, StoreUnresponsive)
        address, cause = f"{world.address}:{world.port}", str(error).partition("\n")[0] or type(error).__name__
        text = f"rank {world.rank}: the ranks' store at {address} has gone, and {self._rendezvous.server}: {cause}"
        if hang:
            text = f"the run hangs: {self._rendezvous.server} at {address} does not respond ({cause}): its process is"
            text += f" stopped, or its machine or network has gone; reported by rank {world.rank} on {self._host}"
        late, host = (0, world.address) if hang else (None, self._host)
        return FailureReport(
            rank=world.rank, text=f"forge-run: {text}", reason=text, hang=hang, silent=hang, late=late, host=host
        )

    def _heartbeat(self, passed_s: float) -> dict[str, Any]:
        position, move = self._beacon.position, (self._beacon.position.count, ProgressBeacon.reports)
        if move != self._last_move or move[0] == 0:  # before the first phase, ranks may wait for others to arrive
            self._learn()
            self._idle_s = self._still_s = self._next_look_s = 0.0
            self._collective = None
        else:
            self._idle_s, self._still_s = self._idle_s + passed_s, self._still_s + passed_s
        self._last_move, self._phase = move, position.name
        self._number += 1
        beat = {
            "number": self._number,
            "host": self._host,
            "count": position.count,
            "step": position.step,
            "phase": str(position),
        }
        # Only of a rank that stands still: stack and flight recorder cost more than the rest, every second
        if self._idle_s >= min(SILENCE_S, self._limit_s / 2):
            beat |= self._standing()
        self._left_s = min(self._limit_s - self._idle_s, self._own_limit() - self._still_s)
        left_s = min(self._left_s, 1e9)  # JSON has no infinity
        return beat | {"idle_s": round(self._idle_s, 1), "left_s": round(left_s, 1), "detail": ProgressBeacon.detail}

    def _standing(self) -> dict[str, Any]:
        """Where this rank stands; whether it may do so for long."""
        frames, collective = sys._current_frames(), unfinished_collectives()
        here = frames.get(self._main)
        waits = here is not None and waits_for_ranks(here)
        has_moved = self._collective not in (None, collective)
        if has_moved:
            self._learn()
        # A compilation may come in any step and takes minutes, and so may disks, networks and hooks in other phases
        steady = (waits or self._phase in COMPUTING) and not any(map(compiles, frames.values()))
        if not steady or has_moved:
            self._still_s = 0.0
        self._collective = collective
        return {"line": line_of(here) if here else "", "waits": waits, "collective": collective}

    def _learn(self) -> None:
        if self._beacon.entered[self._phase] > 1:
            self._longest[self._phase] = max(self._longest.get(self._phase, 0.0), self._still_s)

    def _own_limit(self) -> float:
        """Seconds that this rank may stand still in its phase, as long as it only computes or waits for others."""
        if not self._factor or self._beacon.entered[self._phase] < WARM_UP:
            return self._limit_s
        longest_s = self._longest.get(self._phase, 0.0) + self._rendezvous.heartbeat_s  # which is how exact they are
        return min(max(LEAST_S, self._factor * longest_s), self._limit_s)

    def _silence(self, passed_s: float) -> FailureReport | None:
        """A report on ranks whose heartbeats stand still; None if the next rank's does not, or not for long enough."""
        rank, size, limit_s = self._rendezvous.world.rank, self._rendezvous.world.size, self._rendezvous.silence_s
        following = (rank + 1) % size
        # The others only on suspicion: a machine that has gone takes several ranks with it
        suspicious = self._ages.get(following, (0, 0.0))[1] > limit_s / 3
        heartbeats = self._rendezvous.get(HEARTBEAT, range(size) if suspicious else [following])
        for each, beat in heartbeats.items():
            number, age_s = self._ages.get(each, (0, 0.0))
            # Number 0: its watch is over
            self._ages[each] = (beat["number"], age_s + passed_s if beat["number"] == number != 0 else 0.0)
        is_starting = heartbeats.get(following, {}).get("step") == 0
        if self._ages.get(following, (0, 0.0))[1] <= limit_s * (START_FACTOR if is_starting else 1):
            return None
        self._silent = [each for each, (_, age_s) in self._ages.items() if age_s > limit_s / 2]
        watched = {each: beat for each, beat in heartbeats.items() if beat["number"]}
        text = describe_silence(watched, self._silent, self._ages[following][1])
        return self._report(text, self._silent, watched, silent=True)

    def _report(self, text: str, late: Sequence[int], heartbeats: Heartbeats, silent: bool = False) -> FailureReport:
        first = late[0] if late else None
        host = heartbeats[first]["host"] if first is not None and first in heartbeats else self._host
        reason = " ".join(text.removeprefix("forge-run: ").splitlines()[:2])  # the rest is about each rank
        rank = self._rendezvous.world.rank
        return FailureReport(rank=rank, text=text, reason=reason, hang=True, silent=silent, late=first, host=host)

    def _hang(self) -> FailureReport | None:
        """A report on a hang, once no rank may stand still any longer: not if one saves or tokenizes, and others wait.

        A rank that is stopped publishes nothing, so what it has left does not shrink: that is found by its silence.
        """
        if self._left_s > 0 or self._idle_s < self._next_look_s:
            return None
        # The larger its number the less often a rank looks: the store could not show thousands the heartbeats of all
        self._next_look_s = self._idle_s + self._rendezvous.world.rank
        size = self._rendezvous.world.size
        heartbeats = {r: beat for r, beat in self._rendezvous.get(HEARTBEAT, range(size)).items() if beat["number"]}
        if max(beat["left_s"] for beat in heartbeats.values()) > 0:
            return None
        late = absent_ranks(heartbeats, size) or late_ranks(heartbeats)
        return self._report(describe_hang(heartbeats, size, self._limit_s), late, heartbeats)

    def _end(self, report: FailureReport, patience_s: float) -> None:
        """End this process, unless its main thread does so by itself in time."""
        if self._stopped.wait(patience_s):
            return
        with suppress(StoreUnresponsive):
            call_within(WRITING_S, self._write_stacks)
        with suppress(StoreUnresponsive):
            call_within(WRITING_S, self._emit, report)  # it writes into the run folder, whose disk may have gone
        self._rendezvous.leave(self._silent)  # last: rank 0 waits here until the others know why the run ends
        os._exit(report.code)

    def _write_stacks(self) -> None:
        position, log = self._beacon.position, _descriptor_of_log()
        # By descriptor: the main thread may hold the locks of Python's streams
        os.write(log, f"ended in step {position.step}, {position}; the stacks of all threads:\n".encode())
        faulthandler.dump_traceback(log, all_threads=True)


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


def compiles(frame: FrameType) -> bool:
    """Whether a thread compiles a graph or a kernel, measures variants of one, or imports a module to do so."""
    codes = (inner.f_code for inner, _ in walk_stack(frame))
    names = (code.co_name for code in codes if os.path.basename(code.co_filename) in COMPILERS)
    return any(word in name for name in names for word in BUSY)


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


def describe_silence(heartbeats: Heartbeats, silent: Sequence[int], age_s: float) -> str:
    """Which ranks send no heartbeats any more, and where they were seen last."""
    named = [f"rank {rank} on {heartbeats[rank]['host']}" for rank in silent]
    text = f"{listed(named)} does not respond: no heartbeat for {age_s:.0f} s (launch.silence_timeout_s)"
    lines = [f"forge-run: the run hangs: {text}", "its process is stopped, or its machine or network has gone"]
    lines += [f"  {_describe(rank, heartbeats[rank], rank in silent)}" for rank in _shown(heartbeats, silent)]
    return "\n".join([*lines, "the stacks of each other rank are in its log"])


def describe_hang(heartbeats: Heartbeats, size: int, limit_s: float) -> str:
    """Which of `size` ranks is late, in which phase, and where all are."""
    absent, late = absent_ranks(heartbeats, size), late_ranks(heartbeats)
    phase = " and ".join(sorted({beat["phase"] for beat in heartbeats.values()}))
    idle_s = min(beat["idle_s"] for beat in heartbeats.values())
    limit = f"launch.hang_timeout_s = {limit_s:g} s"
    if idle_s < limit_s:
        limit = f"{idle_s:.0f} s, many times as long as before (launch.hang_factor)"
    lines = [f"forge-run: the run hangs: nothing has moved for {limit}"]
    if absent:
        lines.append(f"rank {listed(absent)} is late: it has not begun")
    elif late:
        places = {f"step {heartbeats[rank]['step']}, {heartbeats[rank]['phase']}" for rank in late}
        named = [f"{rank} on {heartbeats[rank]['host']}" for rank in late]
        lines.append(f"rank {listed(named)} is late, in {' and '.join(sorted(places))}")
    elif all(beat.get("waits") for beat in heartbeats.values()):
        lines.append(f"all wait for each other, in {phase}: one may have left a collective out, or made one too many")
    else:
        lines.append(
            f"no rank is behind the others: all are in {phase}, "
            "and none of them waits for another; is the time too short for it?"
        )
    shown = _shown(heartbeats, absent or late)
    lines += [f"  {_describe(rank, heartbeats[rank])}" for rank in shown]
    if len(heartbeats) > len(shown):
        lines.append(f"  and {len(heartbeats) - len(shown)} more")
    return "\n".join([*lines, "the stacks of each rank are in its log"])


def _shown(heartbeats: Heartbeats, first: Collection[int]) -> list[int]:
    return sorted(heartbeats, key=lambda rank: (rank not in first, rank))[:32]


def absent_ranks(heartbeats: Heartbeats, size: int) -> list[int]:
    """The ranks that have not begun."""
    return [rank for rank in range(size) if rank not in heartbeats]


def late_ranks(heartbeats: Heartbeats) -> list[int]:
    """The ranks that have entered the fewest phases; among equals, those that do not wait for others."""
    # Of ranks that all wait, the one that has come least far is as likely the victim of another's missing collective
    if all(beat.get("waits") for beat in heartbeats.values()):
        return []
    least = min(beat["count"] for beat in heartbeats.values())
    behind = [rank for rank, beat in heartbeats.items() if beat["count"] == least]
    if len(behind) < len(heartbeats):
        return sorted(behind)
    busy = [rank for rank in behind if not heartbeats[rank].get("waits", False)]
    return sorted(busy) if len(busy) < len(heartbeats) else []


def _describe(rank: int, beat: Mapping[str, Any], silent: bool = False) -> str:
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
