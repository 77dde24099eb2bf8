"""The rendezvous of a run's ranks: torch's TCPStore, served by rank 0 or by torchrun's agent.

Ranks use it before there is a process group, and when a process group is of no use because a rank has failed.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from forge_core.contracts.errors import ForgeError, listed
from forge_core.launch.failure_report import EndedElsewhere, FailureReport
from forge_core.launch.world import LISTENING, World

T = TypeVar("T")

POLL_S = 0.05
SLICE_S = 0.25
ANSWER = timedelta(seconds=60)
"""torch's own limit for the store, which acts on some of its calls only; see `call_within` for the others."""
FAREWELL_S = 20.0
"""Seconds that the rank which serves the store stays for the others after a failure, so that they learn of it."""
SILENT_S = 5.0
"""A rank whose heartbeat stands still for this long is not waited for at the end; after a failure for less."""
SILENT_AFTER_FAILURE_S = 1.0
RANKS_A_SECOND = 500
"""With more ranks than this the watchdogs wake less often, so that the store has time for all."""
LOOPBACK = ("127.0.0.1", "localhost")
HEARTBEAT = "heartbeat"
"""Topic under which each rank publishes its heartbeat: a table with `step` (0 before the first one), among others."""
END = "end"


class RanksMissing(ForgeError):
    """Some ranks did not reach the rendezvous in time."""


class StoreUnresponsive(ForgeError):
    """The process that serves the store does not answer: it is stopped, or its machine has gone."""


def call_within(limit_s: float, function: Callable[..., T], *arguments: object) -> T:
    """The result of `function(*arguments)`, called in another thread; after `limit_s` (inf: never) `StoreUnresponsive`.

    TCPStore waits for its server without a deadline in most calls, and holds a lock meanwhile: a rank 0 that is stopped
    (SIGSTOP, a machine that swaps) would block every thread that accesses the store, watchdogs included.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)

    # Not by an executor, whose threads the interpreter joins at exit, stuck ones too
    Thread(target=work, name="forge-store", daemon=True).start()
    waited_s = 0.0
    # In slices, since a process that is itself suspended would find its deadline passed when it continues
    while waited_s < limit_s:
        if wait([future], SLICE_S).done:
            return future.result()
        waited_s += SLICE_S
    raise StoreUnresponsive(f"no answer for {limit_s:g} s")


class Rendezvous:
    """This rank's connection to the other ranks. May be used by several threads.

    Ranks have `start_timeout_s` to arrive, else `RanksMissing` is raised, and the store has `silence_timeout_s` to
    answer a call, else all methods raise `StoreUnresponsive`. A ForgeError: rank 0 cannot serve at its port.
    """

    def __init__(
        self, world: World, start_timeout_s: float, hang_timeout_s: float, silence_timeout_s: float = 0
    ) -> None:
        self.world, self.start_timeout_s, self.hang_timeout_s = world, start_timeout_s, hang_timeout_s
        limit_s = min(silence_timeout_s or math.inf, hang_timeout_s) or math.inf
        self.heartbeat_s = min(max(1.0, world.size / RANKS_A_SECOND), limit_s / 4)
        """Seconds between two heartbeats of a rank."""
        self.silence_s = max(limit_s, 4 * self.heartbeat_s)
        """Seconds without an answer or a heartbeat after which a process counts as gone; inf: never."""
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.server = "torchrun's agent" if agent else "rank 0"
        """The process that serves the store, for messages."""
        self._serves = world.rank == 0 and not agent
        self._unresponsive: StoreUnresponsive | None = None
        self._meetings = 0
        self._store = _named(_serve(world) if self._serves else _connect(world, start_timeout_s))
        self._last_arrival = time.monotonic() + min(start_timeout_s, FAREWELL_S)
        self.set("here", True)

    def group_store(self) -> Store:
        """The store for a process group, over a separate connection: waiting there blocks no call here."""
        return PrefixStore("groups", _named(_connect(self.world, self.start_timeout_s)))

    def set(self, topic: str, value: Any) -> None:
        """Publish a value (plain JSON) of this rank under a topic, in place of an earlier one."""
        self._call(self._store.set, f"{topic}/{self.world.rank}", json.dumps(value))

    def get(self, topic: str, ranks: Iterable[int]) -> dict[int, Any]:
        """The values of some ranks under a topic, without those that have published none."""
        keys = {rank: f"{topic}/{rank}" for rank in ranks}
        # One question for all, since ranks may be a thousand, and for each only if one of them has published nothing
        if not self._exist(keys.values()):
            keys = {rank: key for rank, key in keys.items() if self._exist([key])}
        values = self._call(self._store.multi_get, list(keys.values())) if keys else []  # waits for keys not there
        return {rank: json.loads(value) for rank, value in zip(keys, values, strict=True)}

    def wait_for(self, topic: str, ranks: Sequence[int]) -> dict[int, Any]:
        """The values of all these ranks under a topic, once they are there.

        Raises `EndedElsewhere`, or `RanksMissing` after `start_timeout_s`, which names the ranks.
        """
        keys = [f"{topic}/{rank}" for rank in ranks]
        deadline = time.monotonic() + self.start_timeout_s
        due = min(deadline, time.monotonic() + SILENT_S)
        # By polls and not by the store's own `wait`: that sees neither that the run has ended nor which rank is missing
        while not self._exist(keys):
            if report := self.ending():
                raise EndedElsewhere(report)
            if time.monotonic() > due:
                missing = listed([rank for rank, key in zip(ranks, keys, strict=True) if not self._exist([key])], 20)
                limit = f"launch.start_timeout_s = {self.start_timeout_s:g} s"
                if due == deadline:
                    raise RanksMissing(f"of {self.world.size} ranks, {missing} did not arrive within {limit}")
                warnings.warn(f"waiting for rank {missing} of {self.world.size}, up to {limit}", stacklevel=2)
                due = deadline
            time.sleep(POLL_S)
        return self.get(topic, ranks)

    def on_rank0(self, topic: str, action: Callable[[], object]) -> None:
        """Call `action` on rank 0; the other ranks wait until it returns, and raise `EndedElsewhere` if it fails."""
        if self.world.rank == 0:
            action()
            self.set(topic, True)
        else:
            self.wait_for(topic, [0])

    def meet(self) -> None:
        """Wait until all ranks have called this as often as this one, without a limit other than the watchdog's.

        Raises `EndedElsewhere`.
        """
        self._meetings += 1
        meeting = f"met/{self._meetings}"
        pause_s = POLL_S
        try:
            if self._call(self._store.add, f"{meeting}/ranks", 1) == self.world.size:
                self._call(self._store.set, meeting, "")
            while not self._exist([meeting]):
                if report := self.ending():
                    raise EndedElsewhere(report)
                time.sleep(pause_s)
                # One rank may take an hour, for an export, and thousands of others ask
                pause_s = min(2 * pause_s, self.heartbeat_s)
        except EndedElsewhere:
            raise
        except Exception:
            # The watchdog has the same trouble with the store, describes what it means, and ends this process
            time.sleep(2 * self.heartbeat_s + SILENT_S)
            raise

    def _exist(self, keys: Collection[str]) -> bool:
        return bool(self._call(self._store.check, list(keys)))

    def _call(self, function: Callable[..., T], *arguments: object) -> T:
        # The call without an answer holds the store's lock, so a later one would only wait for it
        if self._unresponsive is not None:
            raise self._unresponsive
        try:
            return call_within(self.silence_s, function, *arguments)
        except StoreUnresponsive as error:
            self._unresponsive = error
            raise

    def end(self, report: FailureReport) -> FailureReport:
        """End the run for all ranks; returns the report that counts, from the first rank to call this."""
        return FailureReport.from_json(self._call(self._store.compare_set, END, "", report.to_json()))

    def ending(self) -> FailureReport | None:
        """Why the run ends, if a rank has ended it."""
        return FailureReport.from_json(self._call(self._store.get, END)) if self._exist([END]) else None

    def leave(self, unresponsive: Collection[int] = ()) -> None:
        """Make the last call, when this rank needs the others no more.

        The rank that serves the store first waits for the others, except `unresponsive` ones: without the store they
        could not learn why the run ends. After a failure it waits for `FAREWELL_S` at the most.
        """
        with suppress(Exception):
            self.set("left", True)
            if self._serves:
                self._see_off([rank for rank in range(self.world.size) if rank not in unresponsive])

    def _see_off(self, ranks: Collection[int]) -> None:
        began = time.monotonic()
        heartbeats: dict[int, Any] = {}
        moved = dict.fromkeys(ranks, began)
        while ranks := {rank for rank in ranks if not self._exist([f"left/{rank}"])}:
            now, beating = time.monotonic(), self.get(HEARTBEAT, ranks)
            moved |= {rank: now for rank, beat in beating.items() if beat != heartbeats.get(rank)}
            heartbeats |= beating
            # A rank that was killed never announces that it leaves; only its heartbeat distinguishes it from a slow one
            patience_s = SILENT_S if self.ending() is None else SILENT_AFTER_FAILURE_S
            silent = now - max(moved[rank] for rank in ranks) > patience_s + 2 * self.heartbeat_s
            # One that was never here may still arrive, and ask why there is no run
            if silent and (now >= self._last_arrival or self._exist([f"here/{rank}" for rank in ranks])):
                return
            # After a success ranks may take as long as they like, in `on_train_end` say
            if now - began > FAREWELL_S and self.ending() is not None:
                return
            time.sleep(POLL_S)


def _named(store: Store) -> Store:
    # torchrun's agent starts workers again with the same store, where the end of the last ones still stands
    return PrefixStore(f"forge/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _serve(world: World) -> Store:
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": ANSWER}
    if LISTENING in os.environ:
        options["master_listen_fd"] = int(os.environ.pop(LISTENING))  # not for processes that this one starts
    try:
        if "master_listen_fd" not in options and world.address in LOOPBACK:
            # torch would listen to all networks, and its store has no secret
            options["master_listen_fd"] = socket.create_server(("127.0.0.1", world.port), backlog=4096).detach()
        return TCPStore(world.address, world.port, **options)
    except (DistNetworkError, OSError) as error:
        raise ForgeError(
            f"cannot serve the ranks' store at port {world.port}; "
            f"set MASTER_PORT to a free port, the same for all ranks: {error}"
        ) from error


def _connect(world: World, timeout_s: float) -> Store:
    # A plain socket first: torch's own attempts cannot be interrupted, and print C++ stack traces
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((world.address, world.port), timeout=5).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise RanksMissing(
                    f"rank {world.rank} cannot reach rank 0 at {world.address}:{world.port} (MASTER_ADDR, MASTER_PORT) "
                    f"within launch.start_timeout_s = {timeout_s:g} s: {error}"
                ) from error
            time.sleep(4 * POLL_S)
    # A rank 0 that is stopped still accepts connections, by its kernel, and torch then waits for its greeting
    return call_within(timeout_s, lambda: TCPStore(world.address, world.port, is_master=False, timeout=ANSWER))
