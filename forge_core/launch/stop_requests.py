"""Requests to stop that reach this process: signals, and those that our launcher passes on.

A thread reads them, so that a second signal ends the process at once even while the main thread waits for other ranks
inside torch, where Python runs no signal handler.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from forge_core.contracts.errors import ExitCode

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

ECHO_S = 1.0
"""The same signal again within this time is not a second one: schedulers signal every process of a job, and a launcher
that gets the signal too passes it on."""

Deliver = Callable[[str], object]


class StopRequests:
    """Requests to stop one process. The first is delivered, a second signal ends the process with exit code 130; those
    that our launcher passes on never count as a second.

    Args:
        deliver: receives the reason, in any thread, perhaps more than once.
        launcher: the socket to our launcher. When it closes, the launcher is dead, and so is this process then.
    """

    def __init__(self, deliver: Deliver, launcher: socket.socket | None = None) -> None:
        self._deliver = deliver
        self._launcher = launcher
        self._last: tuple[int, float] | None = None
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._thread = threading.Thread(target=self._listen, name="forge-stop-requests", daemon=True)

    def open(self) -> None:
        """Install the handlers; only in the main thread."""
        self._old_wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._old_handlers: dict[int, Any] = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        self._thread.start()

    def close(self) -> None:
        """Put back the handlers that were there."""
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        self._write.send(b"\0")
        self._thread.join()
        self._read.close()
        self._write.close()

    @contextmanager
    def delivering(self, deliver: Deliver, afterwards: Deliver) -> Iterator[None]:
        """Requests go to `deliver` while this context lasts, and then to `afterwards`."""
        self._deliver = deliver
        try:
            yield
        finally:
            self._deliver = afterwards

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Deliver at once if the main thread runs Python. The listening thread, which sees every signal too, counts."""
        self._deliver(_reason(number))

    def _listen(self) -> None:
        sources: list[socket.socket] = [self._read, *([self._launcher] if self._launcher else [])]
        while True:
            ready, _, _ = select.select(sources, [], [])
            if self._launcher in ready and self._launcher is not None:
                self._hear(self._launcher)
            if self._read in ready:
                for number in self._read.recv(64):
                    if number == 0:
                        return
                    self._count(number)

    def _hear(self, launcher: socket.socket) -> None:
        try:
            message = launcher.recv(64)
        except OSError:
            message = b""
        if not message:
            os._exit(ExitCode.FAILED)
        self._deliver(_reason(message[-1]))

    def _count(self, number: int) -> None:
        if number not in STOP_SIGNALS:
            return
        now, last = time.monotonic(), self._last
        self._last = (number, now)
        if last is None:
            self._deliver(_reason(number))
        elif last[0] != number or now - last[1] > ECHO_S:
            os._exit(ExitCode.SECOND_SIGNAL)


def _reason(number: int) -> str:
    return f"signal {signal.Signals(number).name}"


_of_process: StopRequests | None = None


def open_for_process(deliver: Deliver, launcher: socket.socket | None) -> None:
    """Listen for requests to stop this process, for the rest of its life."""
    global _of_process
    _of_process = StopRequests(deliver, launcher)
    _of_process.open()


@contextmanager
def requests_to_stop(deliver: Deliver) -> Iterator[None]:
    """Call `deliver` on requests to stop while this context lasts. Without effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if _of_process is not None:
        with _of_process.delivering(deliver, afterwards=_ignore):
            yield
        return
    requests = StopRequests(deliver)
    requests.open()
    try:
        yield
    finally:
        requests.close()


def _ignore(reason: str) -> None:
    """A run that is about to exit has nothing left to stop."""
