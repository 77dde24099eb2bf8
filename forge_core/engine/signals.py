"""Signals: the first asks the run to stop after its step, the second ends the process at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from forge_core.contracts.contexts import Requests
from forge_core.launch.stop_requests import requests_to_stop


@contextmanager
def stop_on_signals(requests: Requests) -> Iterator[None]:
    """While this context lasts, SIGINT, SIGTERM, SIGUSR1 and the launcher set `requests.stop`; nothing else happens,
    because anything more in the middle of a step could deadlock. Without effect outside the main thread."""

    def ask(reason: str) -> None:
        requests.stop = requests.stop or reason

    with requests_to_stop(ask):
        yield
