"""A thread that tells the other ranks where this one is, and ends it when another one has failed or the run hangs.

It wakes once a second and costs a step nothing: the main thread only notes its phase (`Phases`).
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from forge_core.contracts.errors import ExitCode
from forge_core.launch import collectives
from forge_core.launch.failure_report import LastWords, echo_of, speak
from forge_core.launch.progress_beacon import Phases
from forge_core.launch.rendezvous import Meeting

INTERVAL_S = 1.0
RANKS_A_SECOND = 500
"""With more ranks than this the threads wake less often, so that the store has time for all."""
PATIENCE_S = 3.0
"""What the main thread has, once another rank has ended the run, to fail by itself, which closes loggers in order."""
OWN_PATIENCE_S = 30.0
"""What it has if it is the one that failed, for hooks that want to know of it."""
SILENCE_S = 5.0
"""After so long in one phase, a rank also tells the line of code that it is at."""

BEATS = "at"
"""Topic of the store under which ranks tell where they are."""


class Watch:
    """Watches one rank of several while the run lasts.

    Args:
        meeting: the connection to the others.
        phases: where this rank is.
    """

    def __init__(self, meeting: Meeting, phases: Phases) -> None:
        self._meeting = meeting
        self._phases = phases
        self._timeout_s = meeting.hang_timeout_s
        self._interval_s = max(INTERVAL_S, meeting.world.size / RANKS_A_SECOND)
        if self._timeout_s:
            self._interval_s = min(self._interval_s, self._timeout_s / 4)
        self._main = threading.get_ident()
        self._idle_s, self._last_count = 0.0, -1
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forge-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """The run is over, or this rank ends by itself."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        woken = time.monotonic()
        while not self._stopped.wait(self._interval_s):
            now = time.monotonic()
            self._look(min(now - woken, 2 * self._interval_s))  # more: this process was stopped meanwhile
            woken = now

    def _look(self, seconds: float) -> None:
        count = self._phases.place.count
        moved = count != self._last_count or count == 0  # before the first phase, ranks may wait for those to come
        self._idle_s = 0.0 if moved else self._idle_s + seconds
        self._last_count = count
        rank, hang = self._meeting.world.rank, None
        try:
            self._meeting.tell(BEATS, self._beat())
            words = self._meeting.ending()
            if words is None and self._timeout_s and self._idle_s > self._timeout_s:
                hang = self._hang()
                words = self._meeting.end(hang)
        except Exception as error:  # the store has gone, and with it rank 0 or torchrun's agent
            self._end(self._lost(error), PATIENCE_S)
            return
        if words is not None and words.rank == rank:
            self._end(words, 0.0 if hang else OWN_PATIENCE_S)
        elif words is not None:
            self._end(echo_of(words, rank), PATIENCE_S)

    # --- where ranks are -----------------------------------------------------------------------------------------

    def _beat(self) -> dict[str, Any]:
        place = self._phases.place
        beat = {"count": place.count, "step": place.step, "phase": place.phase, "idle_s": round(self._idle_s, 1)}
        if self._idle_s >= min(SILENCE_S, self._timeout_s / 2 or SILENCE_S):
            frame = sys._current_frames().get(self._main)
            if frame is not None:
                beat |= {"line": line_of(frame), "waits": waits_for_ranks(frame)}
            beat |= {"collective": collectives.unfinished()}
        return beat

    def _hang(self) -> LastWords:
        world = self._meeting.world
        text = describe_hang(self._meeting.hear(BEATS, range(world.size)), world.size, self._timeout_s)
        return LastWords(rank=world.rank, code=ExitCode.FAILED, text=text, time=time.monotonic())

    def _lost(self, error: Exception) -> LastWords:
        world = self._meeting.world
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        text = f"forge-run: rank {world.rank}: the ranks' store at {world.address}:{world.port} does not answer"
        text = f"{text}, so rank 0 (or torchrun) is gone: {cause}"
        return LastWords(rank=world.rank, code=ExitCode.FAILED, text=text, time=time.monotonic())

    # --- the end -------------------------------------------------------------------------------------------------

    def _end(self, words: LastWords, patience_s: float) -> None:
        """End this process, unless its main thread does so by itself in time."""
        if self._stopped.wait(patience_s):
            return
        place, log = self._phases.place, _descriptor_of_log()
        os.write(log, f"ended in step {place.step}, {place.phase}; the stacks of all threads:\n".encode())
        faulthandler.dump_traceback(log, all_threads=True)
        speak(words)
        self._meeting.leave()
        os._exit(words.code)


def _descriptor_of_log() -> int:
    """Of standard error, which is the log of a rank that the command line has started."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError):  # a notebook, say, has put something else there
        return 2


def line_of(frame: FrameType) -> str:
    """The innermost line of code that is not the standard library's own waiting."""
    found: FrameType | None = frame
    while found is not None and os.path.basename(found.f_code.co_filename) in ("threading.py", "queue.py"):
        found = found.f_back
    shown = found or frame
    return f"{shown.f_code.co_filename}:{shown.f_lineno} in {shown.f_code.co_name}"


def waits_for_ranks(frame: FrameType | None) -> bool:
    """Whether a thread is inside torch.distributed, waiting for other ranks."""
    depth = 0
    while frame is not None and depth < 12:
        if f"{os.sep}torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename:
            return True
        frame, depth = frame.f_back, depth + 1
    return False


def describe_hang(beats: Mapping[int, Mapping[str, Any]], size: int, timeout_s: float) -> str:
    """Which rank is late, in which phase, and where all are.

    Args:
        beats: what each rank told last, by rank.
    """
    silent = [rank for rank in range(size) if rank not in beats]
    late = silent or _late(beats)
    lines = [f"forge-run: the run hangs: nothing has moved for launch.hang_timeout_s = {timeout_s:g} s"]
    if silent:
        lines.append(f"rank {_listed(silent)} is late: it has not begun")
    elif late:
        places = {f"step {beats[rank]['step']}, {beats[rank]['phase']}" for rank in late}
        lines.append(f"rank {_listed(late)} is late, in {' and '.join(sorted(places))}")
    else:
        lines.append(f"no rank is behind the others: {_what_all_do(beats)}")
    shown = sorted(beats, key=lambda rank: (rank not in late, rank))[:32]
    lines += [f"  {_where(rank, beats[rank])}" for rank in shown]
    if len(beats) > len(shown):
        lines.append(f"  and {len(beats) - len(shown)} more")
    return "\n".join([*lines, "the stacks of each rank are in its log"])


def _late(beats: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Those that have come least far; among equals, those that do not wait for others."""
    least = min(beat["count"] for beat in beats.values())
    behind = [rank for rank, beat in beats.items() if beat["count"] == least]
    if len(behind) < len(beats):
        return sorted(behind)
    busy = [rank for rank in behind if not beats[rank].get("waits", False)]
    return sorted(busy) if len(busy) < len(beats) else []


def _what_all_do(beats: Mapping[int, Mapping[str, Any]]) -> str:
    phase = next(iter(beats.values()))["phase"]
    if all(beat.get("waits") for beat in beats.values()):
        return f"all wait for each other in {phase}"
    return f"all are in {phase}, and none of them waits for another; is the time too short for it?"


def _where(rank: int, beat: Mapping[str, Any]) -> str:
    text = f"rank {rank}: step {beat['step']}, {beat['phase']}, for {beat['idle_s']:.0f} s"
    if beat.get("waits"):
        text += ", waiting for other ranks"
    if beat.get("line"):
        text += f" at {beat['line']}"
    return text + (f", in {beat['collective']}" if beat.get("collective") else "")


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:20])) + (" …" if len(ranks) > 20 else "")
