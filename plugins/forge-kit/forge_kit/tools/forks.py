"""Forked processes whose garbage collector leaves alone what they inherit."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Within this context, no garbage is collected by itself: neither here nor in a process that is forked here.

    To collect inherited garbage may end a fork or hang it: freeing a process group waits for its threads, which a fork
    does not copy. What libraries register with `os.register_at_fork` runs before anything of ours, and may allocate
    enough to start a collection. A fork must call `collect_own_garbage`, or its collector stays off.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_own_garbage() -> None:
    """Turn on the collector of a fork, for objects that it makes itself.

    To search those that it inherits would also copy their memory.
    """
    gc.freeze()
    gc.enable()
