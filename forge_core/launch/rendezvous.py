"""Where the ranks of a run speak besides any process group: before there is one, and when it is of no use.

A key-value store (torch's TCPStore) that rank 0 serves, or torchrun's agent. Nothing waits in it for longer than a
moment at a time, so that a rank can always be ended.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    PrefixStore,
    Store,
    TCPStore,
)

from forge_core.contracts.errors import ForgeError
from forge_core.launch.failure_report import EndedElsewhere, LastWords
from forge_core.launch.world import LISTENING, World

POLL_S = 0.05
ANSWER_S = 60.0
"""The store answers at once, or the process that serves it is gone or stopped."""
FAREWELL_S = 20.0
"""How long the rank that serves the store stays for the others, so that they hear why the run ends."""
END = "end"


class Absent(ForgeError):
    """Ranks did not come to the meeting in time."""


class Meeting:
    """This rank's connection to the others.

    Args:
        start_timeout_s: how long to wait for ranks that have not come yet, in seconds.
        hang_timeout_s: limit of the process groups of this run, in seconds; 0: none.
    """

    def __init__(self, world: World, store: Store, start_timeout_s: float, hang_timeout_s: float) -> None:
        self.world = world
        self._store = store
        self.start_timeout_s = start_timeout_s
        self.hang_timeout_s = hang_timeout_s
        self._opened = time.monotonic()
        self.tell("here", True)

    def group_store(self) -> Store:
        """The store for a process group, over a connection of its own: waiting there stops nobody here."""
        return PrefixStore("groups", _connect(self.world, self.start_timeout_s, serve=False))

    # --- what ranks tell -----------------------------------------------------------------------------------------

    def tell(self, topic: str, value: Any) -> None:
        """Say something under a topic; plain JSON. Saying it again replaces it."""
        self._store.set(f"{topic}/{self.world.rank}", json.dumps(value))

    def hear(self, topic: str, ranks: Iterable[int]) -> dict[int, Any]:
        """What some ranks have said under a topic; those that have said nothing are left out."""
        keys = {rank: f"{topic}/{rank}" for rank in ranks}
        if not self._store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        values = self._store.multi_get(list(keys.values())) if keys else []
        return {rank: json.loads(value) for rank, value in zip(keys, values, strict=True)}

    def wait_for(self, topic: str, ranks: Sequence[int]) -> dict[int, Any]:
        """What all these ranks say under a topic.

        Raises:
            Absent: some say nothing within `start_timeout_s`; names them.
            EndedElsewhere: another rank has ended the run.
        """
        keys = [f"{topic}/{rank}" for rank in ranks]
        deadline = time.monotonic() + self.start_timeout_s
        while not self._store.check(keys):
            if words := self.ending():
                raise EndedElsewhere(words)
            if time.monotonic() > deadline:
                missing = [rank for rank, key in zip(ranks, keys, strict=True) if not self._store.check([key])]
                raise Absent(_absent(missing, self.world.size, self.start_timeout_s))
            time.sleep(POLL_S)
        return self.hear(topic, ranks)

    def on_first(self, topic: str, action: Callable[[], object]) -> None:
        """Do something on rank 0 alone; the others wait until it is done.

        Raises:
            EndedElsewhere: on the others, if it failed.
        """
        if self.world.rank == 0:
            action()
            self.tell(topic, True)
        else:
            self.wait_for(topic, [0])

    # --- the end -------------------------------------------------------------------------------------------------

    def end(self, words: LastWords) -> LastWords:
        """End the run for all ranks; gives the last words that count, those of the first rank to call this."""
        return LastWords.from_json(self._store.compare_set(END, "", words.to_json()))

    def ending(self) -> LastWords | None:
        """Why the run ends, if some rank has said so."""
        return LastWords.from_json(self._store.get(END)) if self._store.check([END]) else None

    def leave(self) -> None:
        """The last call: this rank needs the others no more. The one that serves the store waits for them to leave."""
        global _of_process
        _of_process = None
        with suppress(Exception):  # whoever serves the store has gone
            self.tell("left", True)
            if _serves(self.world):
                deadline = time.monotonic() + FAREWELL_S
                while self._awaited() and time.monotonic() < deadline:
                    time.sleep(POLL_S)

    def _awaited(self) -> list[int]:
        """Ranks that have not left; those that did not even come are not awaited for long."""
        there = [rank for rank in range(self.world.size) if not self._store.check([f"left/{rank}"])]
        if time.monotonic() < self._opened + min(self.start_timeout_s, FAREWELL_S):
            return there
        return [rank for rank in there if self._store.check([f"here/{rank}"])]


_of_process: Meeting | None = None


def meet(world: World, start_timeout_s: float, hang_timeout_s: float) -> Meeting:
    """The meeting of this process, which is connected at the first call.

    Raises:
        Absent: rank 0 cannot be reached within `start_timeout_s`.
        ForgeError: rank 0 cannot serve at its port.
    """
    global _of_process
    if _of_process is None:
        _of_process = Meeting(world, _connect(world, start_timeout_s), start_timeout_s, hang_timeout_s)
    return _of_process


def current_meeting() -> Meeting | None:
    """The meeting of this process, if it has joined one."""
    return _of_process


def _connect(world: World, timeout_s: float, serve: bool = True) -> Store:
    answer = timedelta(seconds=ANSWER_S)
    if serve and _serves(world):
        store = _serve(world, answer)
    else:
        _wait_for_host(world, timeout_s)
        store = TCPStore(world.address, world.port, is_master=False, timeout=answer)
    return PrefixStore(_name(os.environ), store)


def _serve(world: World, answer: timedelta) -> Store:
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": answer}
    if LISTENING in os.environ:
        options["master_listen_fd"] = int(os.environ.pop(LISTENING))
    try:
        return TCPStore(world.address, world.port, **options)
    except DistNetworkError as error:
        fix = "set MASTER_PORT to a free port, the same for all ranks"
        raise ForgeError(f"rank 0 cannot serve the ranks' store at port {world.port}; {fix}: {error}") from error


def _serves(world: World) -> bool:
    """torchrun's agent serves the store itself."""
    return world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _name(variables: Mapping[str, str]) -> str:
    """torchrun's agent outlives its workers, and starts them again with the same store."""
    return f"forge/{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _wait_for_host(world: World, timeout_s: float) -> None:
    """A plain connection first: torch's own attempts cannot be interrupted, and write stack traces of C++."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((world.address, world.port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                where = f"rank 0 at {world.address}:{world.port} (MASTER_ADDR, MASTER_PORT)"
                seen = f"rank {world.rank} cannot reach {where} within launch.start_timeout_s = {timeout_s:g} s"
                raise Absent(f"{seen}: {error}") from error
            time.sleep(4 * POLL_S)


def _absent(missing: Sequence[int], size: int, timeout_s: float) -> str:
    which = ", ".join(map(str, missing[:20])) + (" …" if len(missing) > 20 else "")
    return f"of {size} ranks, {which} did not arrive within launch.start_timeout_s = {timeout_s:g} s"
