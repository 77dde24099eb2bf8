"""Processes that have imported torch already, and become ranks on request."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

SOCKET = "FORGE_SPARE_FD"
AFTER_S = 5.0
"""Seconds after a start until spare processes are made, so that they take no processor from ranks that begin."""


class Spares:
    """A spare process for each of `ranks`. Called as `subprocess.Popen` is, it makes one of them that process."""

    def __init__(self, ranks: int, after_s: float = AFTER_S) -> None:
        self._ranks, self._after_s = ranks, after_s
        self._waiting: list[tuple[subprocess.Popen, socket.socket]] = []
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def __call__(
        self, command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **more: Any
    ) -> subprocess.Popen:
        """Start `command`, a command line of `python -m forge_core`, in a spare process if there is one."""
        with self._lock:
            self._refill_later()
            while self._waiting:
                process, control = self._waiting.pop(0)  # the oldest, which is most likely to be ready
                with control:
                    # A spare process may have died since, as when memory was short: then the next one is tried
                    if process.poll() is None and _send(control, command, env, pass_fds):
                        return process
        return subprocess.Popen(command, env=env, pass_fds=pass_fds, **more)

    def ready(self) -> int:
        """How many have imported everything."""
        with self._lock:
            return sum(bool(_peek(control)) for _, control in self._waiting)

    def close(self) -> None:
        """End those that were not used."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            for process, control in self._waiting:
                control.close()  # at which it ends
                process.kill()
                process.wait()
            self._waiting.clear()

    def _refill_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(self._after_s, self._refill)
        self._timer.daemon = True
        self._timer.start()

    def _refill(self) -> None:
        with self._lock:
            while len(self._waiting) < self._ranks:
                self._waiting.append(self._start())

    def _start(self) -> tuple[subprocess.Popen, socket.socket]:
        ours, theirs = socket.socketpair()
        # As the supervisor does for ranks: torch reads it when it is imported
        threads = max(1, len(os.sched_getaffinity(0)) // self._ranks)
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ, SOCKET: str(theirs.fileno())}
        with theirs:
            # In a separate session, as ranks are: the terminal's Ctrl-C comes to the supervisor alone
            process = subprocess.Popen(
                [sys.executable, "-m", "forge_plugin_launch.spares"],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return process, ours


def _peek(control: socket.socket) -> bytes:
    try:
        # Peeked at and not taken, since the byte is the only sign that it is ready
        return control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return b""


def _send(control: socket.socket, command: Sequence[str], env: Mapping[str, str], descriptors: Sequence[int]) -> bool:
    """Tell a spare process what to become; returns whether it was there."""
    numbers = [str(number) for number in descriptors]
    places = {name: numbers.index(value) for name, value in env.items() if name.endswith("_FD") and value in numbers}
    # Without `python -m forge_core`, which this process replaces by `runpy`; descriptors arrive under other numbers
    table = {"arguments": list(command[3:]), "environment": dict(env), "descriptors": places}
    text = json.dumps(table).encode()
    try:
        # The length first, as the text may arrive in several parts
        socket.send_fds(control, [len(text).to_bytes(8)], list(descriptors))
        control.sendall(text)
    except OSError:
        return False
    return True


def main() -> int:
    """Import what every rank needs, wait for a command, and be it."""
    from forge_core import Trainer  # noqa: F401

    with socket.socket(fileno=int(os.environ.pop(SOCKET))) as control:
        with suppress(BrokenPipeError):  # it has its command already, or nobody needs it any more
            control.sendall(b"r")
        header, descriptors, _, _ = socket.recv_fds(control, 8, 16)
        if len(header) < 8:  # nobody needs this process any more
            return 0
        text, size = b"", int.from_bytes(header)
        while len(text) < size and (more := control.recv(size - len(text))):
            text += more
    table = json.loads(text)
    # Cleared, so that no variable of the spare process itself stays
    os.environ.clear()
    os.environ.update(table["environment"])
    os.environ.update({name: str(descriptors[place]) for name, place in table["descriptors"].items()})
    sys.argv = ["forge-run", *table["arguments"]]
    runpy.run_module("forge_core", run_name="__main__")  # as `python -m forge_core` does; leaves by SystemExit
    return 0


if __name__ == "__main__":
    sys.exit(main())
