"""Signals: the first asks the run to stop after its step, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from forge_core.engine.hooks import Requests
from forge_core.errors import ExitCode

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def stop_on_signals(requests: Requests) -> Iterator[None]:
    """While this context lasts, SIGINT, SIGTERM and SIGUSR1 set `requests.stop`; the handlers do nothing else, because
    anything more in the middle of a step could deadlock. Without effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if requests.stop.startswith("signal"):
            os._exit(ExitCode.SECOND_SIGNAL)
        requests.stop = f"signal {signal.Signals(number).name}"

    previous: dict[signal.Signals, Any] = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
