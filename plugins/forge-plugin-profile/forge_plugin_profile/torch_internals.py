"""Everything private to torch that profiles use; `tests/test_torch_internals.py` names what a torch has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def begin_memory_history(entries: int) -> None:
    """Let torch record the last `entries` allocations of the GPU and what led to them, as its docs on memory say."""
    torch.cuda.memory._record_memory_history(max_entries=entries)


def dump_memory_history(path: str) -> None:
    """Write the file that pytorch.org/memory_viz shows."""
    torch.cuda.memory._dump_snapshot(path)


def end_memory_history() -> None:
    """Let torch record no more, and forget what it has."""
    torch.cuda.memory._record_memory_history(enabled=None)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Returns what `Module.__call__` runs in the place of `plain_call`; None unless the module is compiled."""
    return module._compiled_call_impl


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """Returns what `Module.__call__` runs where the module is not compiled: `forward` with all hooks."""
    return module._call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Let `Module.__call__` run `call`, which is outside of the compiled region; None: `plain_call`."""
    module._compiled_call_impl = call  # type: ignore[assignment]
