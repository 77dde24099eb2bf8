"""Deliveries that wait for a server: sent in order by a thread, kept in a file where they are not sent yet."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_core.files import write_atomically

LONGEST_PAUSE_S = 60.0
Item = Mapping[str, Any]
"""Something to deliver, of JSON's types."""


class Outbox:
    """Delivers items in order, in the background.

    Args:
        path: file for undelivered items, one line of JSON each; its items come first.
        deliver: delivers some items, or raises; the items of a failed call are tried again, in the same order.
        batch: most items of a call.
        name: of the service, for the one warning of a run.
        keep: whether an item of the file is still to be delivered.
    """

    def __init__(
        self,
        path: Path,
        deliver: Callable[[Sequence[Item]], None],
        batch: int,
        name: str,
        keep: Callable[[Item], bool] = lambda item: True,
    ) -> None:
        self._path, self._deliver, self._batch, self._name = path, deliver, batch, name
        earlier = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        self._waiting: deque[Item] = deque(filter(keep, earlier))
        self._changed = threading.Condition()
        self._ends_at: float | None = None
        self._warned = False
        self._thread = threading.Thread(target=self._work, name=f"{name} outbox", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Append an item and wake the thread; does not wait for the delivery."""
        with self._changed:
            self._waiting.append(item)
            self._changed.notify_all()

    def save(self) -> None:
        """Write the undelivered items to the file; there is no file if none are left."""
        with self._changed:
            text = "".join(json.dumps(item) + "\n" for item in self._waiting)
        if not text:
            self._path.unlink(missing_ok=True)
            return
        write_atomically(self._path, text)

    def close(self, patience_s: float) -> int:
        """Deliver within `patience_s` seconds and save the undelivered items. Returns the number of saved items."""
        with self._changed:
            self._ends_at = time.monotonic() + patience_s
            self._changed.notify_all()
        # A call that still waits for the server is abandoned: its items are saved, and may so be delivered twice
        self._thread.join(patience_s)
        self.save()
        return len(self._waiting)

    def _work(self) -> None:
        pause = 0.5
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ends_at is not None)
                # Left in the queue until they are delivered: `save` must include the ones on their way
                items = [self._waiting[i] for i in range(min(self._batch, len(self._waiting)))]
            if not items:  # `close` was called, and nothing is left
                return
            try:
                self._deliver(items)
            # Of any kind: what fails here must not end a run, and may work later
            except Exception as error:
                self._warn(error)
                if not self._rest(pause):
                    return
                pause = min(2 * pause, LONGEST_PAUSE_S if self._ends_at is None else 2)
                continue
            pause = 0.5
            with self._changed:
                for _ in items:
                    self._waiting.popleft()

    def _rest(self, pause: float) -> bool:
        """Wait before another try. Returns False once the time of `close` is over."""
        with self._changed:
            closing = self._ends_at is not None
            # The end of the run cuts a long pause short: the last tries come at once.
            self._changed.wait_for(lambda: not closing and self._ends_at is not None, timeout=pause)
            return self._ends_at is None or time.monotonic() < self._ends_at

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"{self._name}: {error}; training continues, and lines wait until it answers", stacklevel=2)
