"""Measures the peak memory of a function on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_of(function: Callable[[], Any]) -> int:
    """Return the peak bytes of tensors that `function` allocates, without those that existed before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(change for _, change in changes), default=0)
