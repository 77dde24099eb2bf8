"""The collective that a rank waits in, by torch's flight recorder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

RECORDERS = {"gloo": "_dump_fr_trace_json", "NCCL": "_dump_nccl_trace_json"}
"""The function that dumps the record of each library; which of them exist depends on how torch was built."""


def unfinished() -> str:
    """The oldest collective of this rank that was begun and not completed, of each library, in words. Empty if there is
    none, or if the recorder keeps nothing (`TORCH_FR_BUFFER_SIZE = 0`)."""
    return ", ".join(filter(None, (_oldest_of(library, name) for library, name in RECORDERS.items())))


def _oldest_of(library: str, name: str) -> str:
    dump = getattr(torch._C._distributed_c10d, name, None)
    if dump is None or (library == "NCCL" and not torch.cuda.is_initialized()):
        return ""
    try:
        return oldest_unfinished(json.loads(dump(includeCollectives=True, onlyActive=False)))
    except (RuntimeError, TypeError, ValueError) as error:
        return f"a {library} collective without a readable record ({type(error).__name__}: {error})"


def oldest_unfinished(record: Mapping[str, Any]) -> str:
    """The oldest entry that is not completed, in words; empty if there is none.

    Args:
        record: as torch's recorder dumps it. Its `entries` are dicts, oldest first, with `state`, `retired`,
            `profiling_name`, `collective_seq_id`, `process_group` (name, description) and `input_sizes`.
    """
    return next((_describe(entry) for entry in _open_entries(record)), "")


def _open_entries(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for entry in record.get("entries", ()):
        if entry.get("state") != "completed" and not entry.get("retired"):
            yield entry


def _describe(entry: Mapping[str, Any]) -> str:
    group = " ".join(str(part) for part in entry.get("process_group", ()))
    name, number = entry.get("profiling_name", "?"), entry.get("collective_seq_id", "?")
    return f"{name} number {number} of group {group} over {entry.get('input_sizes', '?')}"
