"""Requests to stop that reach this process: signals, and those that our launcher passes on, read by a thread."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

from forge_core.contracts.errors import ExitCode

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
ECHO_S = 1.0
"""The same signal again within this time is not a second one: schedulers signal all processes, and launchers do too."""

Deliver = Callable[[signal.Signals], object]


def end_at_once() -> None:
    """End this process with exit code 130: its main thread may never come back from where it waits."""
    os._exit(ExitCode.SECOND_SIGNAL)


class StopRequests:
    """Receives requests to stop from when it is made, in the main thread, until `close`.

    `deliver` receives the signal, in any thread, perhaps more than once; it may be replaced. Requests by the socket
    `launcher` never count as a second signal, at which a thread of ours calls `on_second`. When the socket closes, this
    process ends.
    """

    def __init__(
        self, deliver: Deliver, launcher: socket.socket | None = None, on_second: Callable[[], object] = end_at_once
    ) -> None:
        self.deliver, self._launcher, self._on_second = deliver, launcher, on_second
        self._last: tuple[int, float] | None = None
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)  # as Python requires: its C handler writes there, and must never wait
        # A thread, since Python runs no handler while the main thread is inside a collective. The byte that the C
        # handler writes to this descriptor wakes the thread even then.
        self._old_wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._old_handlers: dict[int, Any] = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        self._thread = threading.Thread(target=self._listen, name="forge-stop-requests", daemon=True)
        self._thread.start()
        _listening.add(self)

    def close(self) -> None:
        """Put back the handlers that were there."""
        _listening.discard(self)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)  # before its descriptor is closed, to which a signal would be written
        self._write.send(b"\0")  # no signal has this number
        self._thread.join()
        self._read.close()
        self._write.close()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        # The wakeup descriptor needs signals to have a handler. It delivers too, so that the main thread sees the
        # request in its next line, but does not count, or each signal would be two.
        self.deliver(signal.Signals(number))

    def _listen(self) -> None:
        sources = [source for source in (self._read, self._launcher) if source]
        while True:
            ready = wait(sources)  # `select` takes no descriptor above 1,023, and a process may have opened as many
            if self._launcher is not None and self._launcher in ready:
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
        if not message:  # killed: nobody would end the ranks, and the next start would find their lock on the folder
            os._exit(ExitCode.FAILED)
        self.deliver(signal.Signals(message[-1]))

    def _count(self, number: int) -> None:
        if number not in STOP_SIGNALS:  # another library's handler: the wakeup descriptor gets every signal
            return
        now, last = time.monotonic(), self._last
        self._last = (number, now)
        if last is None:
            self.deliver(signal.Signals(number))
        elif last[0] != number or now - last[1] > ECHO_S:
            self._on_second()


_listening: set[StopRequests] = set()


def _stop_listening_in_child() -> None:
    """A fork shares the socket, and a signal to the child alone (`Process.terminate`) would stop the run."""
    if _listening:
        _listening.clear()
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:  # the terminal's Ctrl-C reaches children too, of which the parent decides
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)


os.register_at_fork(after_in_child=_stop_listening_in_child)
