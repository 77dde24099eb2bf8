"""How fast a process decodes, for the log of the run. Nothing of it reaches a batch: that depends on no clock."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from attrs import define

logger = logging.getLogger(__name__)

EVERY_S = 60.0
"""Seconds of decoding between two lines."""


@define
class Throughput:
    """What this process has decoded since its last line."""

    frames: int = 0
    seconds: float = 0.0

    def add(self, frames: int, seconds: float) -> None:
        """Count decoded frames, and write a line when it is time."""
        self.frames += frames
        self.seconds += seconds
        if self.seconds >= EVERY_S:
            logger.info("videos: %.0f frames a second of decoding in this process", self.frames / self.seconds)
            self.frames, self.seconds = 0, 0.0


_throughput = Throughput()


@contextmanager
def decoding(frames: int) -> Iterator[None]:
    """Count the time inside the context as the decoding time of this number of frames."""
    start = perf_counter()
    yield
    _throughput.add(frames, perf_counter() - start)
