"""The collective that NCCL is in, as torch's flight recorder tells it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch


def unfinished() -> str:
    """The oldest collective of this rank that was begun and not completed, in words; empty without NCCL, or where the
    recorder keeps nothing (`TORCH_FR_BUFFER_SIZE = 0`)."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None or not torch.cuda.is_initialized():
        return ""
    try:
        return oldest_unfinished(json.loads(dump(includeCollectives=True, onlyActive=True)))
    except (RuntimeError, TypeError, ValueError) as error:
        return f"a collective that the flight recorder does not tell ({type(error).__name__}: {error})"


def oldest_unfinished(trace: Mapping[str, Any]) -> str:
    """See `unfinished`.

    Args:
        trace: what torch's recorder gives: a list `entries`, oldest first, each with `state`, `profiling_name`,
            `collective_seq_id`, `process_group` (name, description) and `input_sizes`.
    """
    for entry in trace.get("entries", ()):
        if entry.get("state") != "completed":
            group = "/".join(str(part) for part in entry.get("process_group", ()))
            name, number = entry.get("profiling_name", "?"), entry.get("collective_seq_id", "?")
            return f"{name} number {number} of group {group} over {entry.get('input_sizes', '?')}, {entry.get('state')}"
    return ""
