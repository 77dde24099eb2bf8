"""Metrics of a step, from the device to the loggers without waiting.

A step copies one small vector to pinned memory, asynchronously. Its line is written once the copy has arrived, in order
and at most two steps later: reading a number on the host at once would wait for all work queued on the device, which
would then idle until the host has queued the next step. Two steps bound the pinned memory, and how late the non-finite
policy acts.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import define
from torch import Tensor

from forge_core.auxiliary import Count

MAX_LAG = 2
"""Steps that a line may stay behind."""

SOURCE_LOSS = "loss/source/"
"""Prefix of a source's name. Not `loss/` alone, which prefixes the terms of a loss: a source may have any name."""

ABSENT = -math.inf
"""The loss of a source without a valid token in a step, which only the device knows. The line leaves it out."""


@define
class _Pending:
    """The line of a step whose numbers are on their way to the host."""

    record: dict[str, Any]
    sizes: Mapping[str | Count, int]
    """How many values each name has, in order."""
    values: Tensor
    arrived: torch.cuda.Event | None

    def ready(self) -> bool:
        return self.arrived is None or self.arrived.query()

    def line(self) -> dict[str, Any]:
        if self.arrived is not None:
            self.arrived.synchronize()
        line, counts = dict(self.record), dict[str, dict[str, list[float]]]()
        values = iter(self.values.tolist())
        for name, size in self.sizes.items():
            own = [next(values) for _ in range(size)]
            if isinstance(name, Count):
                counts.setdefault(name.name, {})[str(name.row)] = own
            elif own[0] != ABSENT or not name.startswith(SOURCE_LOSS):
                line[name] = own[0]
        return line | ({"counts": counts} if counts else {})


def _on_one_device(tensors: Sequence[Tensor]) -> list[Tensor]:
    # Tensors on the host (the gradient norm of offloaded parameters) move to the device: else the host waits.
    home = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    return [tensor.to(home, non_blocking=True) for tensor in tensors]


class Tracker:
    """Collects the numbers that a step has on the device, and delivers complete records in order."""

    def __init__(self, deliver: Callable[[dict[str, Any]], None]) -> None:
        """`deliver` receives each record once its numbers are on the host."""
        self._deliver = deliver
        self._pending: deque[_Pending] = deque()

    def put(self, record: Mapping[str, Any], scalars: Mapping[str | Count, Tensor]) -> None:
        """Queue a step's line: numbers on the host (`record`), and scalars and counts on the device (`scalars`)."""
        sizes = {name: tensor.numel() for name, tensor in scalars.items()}
        # One vector, and so one copy a step.
        dtype = torch.float64 if any(t.dtype == torch.float64 for t in scalars.values()) else torch.float32
        stacked = torch.cat([tensor.detach().to(dtype).reshape(-1) for tensor in _on_one_device([*scalars.values()])])
        arrived = None
        if stacked.device.type == "cuda":
            host = torch.empty(stacked.shape, dtype=dtype, pin_memory=True)
            host.copy_(stacked, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()  # after the copy, on the same stream
            stacked = host
        self._pending.append(_Pending(dict(record), sizes, stacked, arrived))
        while self._pending and (len(self._pending) > MAX_LAG or self._pending[0].ready()):
            self._deliver(self._pending.popleft().line())

    def flush(self) -> None:
        """Deliver everything, waiting for it."""
        while self._pending:
            self._deliver(self._pending.popleft().line())


class Clock:
    """Tokens per second over a short window of steps, so that a slow step shows."""

    WINDOW = 10

    def __init__(self) -> None:
        self.restart()

    def tick(self, tokens: int) -> tuple[float, float]:
        """Count `tokens` more; returns (seconds since the last tick, tokens per second over the window)."""
        now = time.perf_counter()
        previous, total = self._marks[-1]
        self._marks.append((now, total + tokens))
        first_time, first_total = self._marks[0]
        return now - previous, (total + tokens - first_total) / max(now - first_time, 1e-9)

    def restart(self) -> None:
        """Start the window afresh, so that a pause does not count."""
        self._marks: deque[tuple[float, int]] = deque([(time.perf_counter(), 0)], maxlen=self.WINDOW + 1)


def per_source(names: Sequence[str], sources: Tensor, sums: Tensor, counts: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Loss sum and count of each source's sequences. `sources`, `sums`, `counts`: (sequences of the step,)."""
    zeros = torch.zeros(len(names), dtype=sums.dtype, device=sums.device)
    total, count = zeros.index_add(0, sources, sums), zeros.index_add(0, sources, counts.to(sums.dtype))
    return {name: (total[i], count[i]) for i, name in enumerate(names)}
