"""What `torch.pretend` is: the functions that torch and Forge ask of a device's module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .clocks import Event, Stream, clocks
from .memory import memory

__all__ = ["Event", "Stream"]

BYTES = 8 << 30
"""What the device claims to have."""


class _One(int):
    """A number of devices of which each rank has the one with index 0: torch's autograd serves no other without C++."""

    def __rmod__(self, rank: int) -> int:
        return 0


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    """One for each rank of this machine."""
    return _One(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    """There is one device for a process."""


@contextmanager
def device(which: Any) -> Iterator[None]:
    """As `torch.cuda.device`."""
    yield


def get_device_name(which: Any = None) -> str:
    return "pretended device"


def synchronize(which: Any = None) -> None:
    for stream in list(clocks.streams.values()):
        clocks.wait("device", stream.now())


def current_stream(which: Any = None) -> Stream:
    return clocks.current()


def default_stream(which: Any = None) -> Stream:
    return clocks.default


def set_stream(stream: Stream) -> None:
    clocks.stack()[-1] = stream


@contextmanager
def stream(of: Stream | None) -> Iterator[None]:
    """As `torch.cuda.stream`; None changes nothing."""
    if of is None:
        yield
        return
    with of:
        yield


def manual_seed(seed: int) -> None:
    """The device draws from the host's generator, so that it draws the same numbers as the CPU."""
    torch.default_generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Called by `torch.manual_seed`, which seeds the host's generator itself."""


def get_rng_state(which: Any = None) -> Tensor:
    return torch.get_rng_state()


def set_rng_state(state: Tensor, which: Any = None) -> None:
    torch.set_rng_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def mem_get_info(which: Any = None) -> tuple[int, int]:
    return BYTES - memory.now, BYTES


def memory_stats(which: Any = None) -> dict[str, int]:
    return {
        "allocated_bytes.all.current": memory.now,
        "allocated_bytes.all.peak": memory.peak,
        "reserved_bytes.all.peak": memory.peak,
    }


def memory_allocated(which: Any = None) -> int:
    return memory.now


def max_memory_allocated(which: Any = None) -> int:
    return memory.peak


def reset_peak_memory_stats(which: Any = None) -> None:
    memory.peak = memory.now


def empty_cache() -> None:
    """Nothing is cached."""
