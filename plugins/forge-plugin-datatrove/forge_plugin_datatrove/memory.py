"""Memory and open files that a phase of deduplication needs, compared with the machine before it starts.

datatrove checks neither: machines have hung for a day in the second stage of MinHash (datatrove#222, #298). The figures
are upper bounds, which the tests compare with what datatrove's steps take.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from attrs import define, frozen
from datatrove.pipeline.base import PipelineStep

from forge_core.contracts.errors import JobError
from forge_kit.tools.control_group import MemoryGroup

GB = 10**9
FILE = 10_000
"""Bytes for each open file of signatures, in addition to the signatures that are read at a time."""
NODE = 280
"""Bytes for each document that has a duplicate, when clusters are made: its place in two dictionaries and a list."""
SUFFIXES, WIDE_SUFFIXES = 9, 15
"""Bytes for each byte of a sequence whose repeated passages are found, in the worst case, where all of it repeats."""
CHUNKS = 3 * 10**7
"""Bytes of parts that are looked at together."""
MOST_SEQUENCE = 2**32 - 2**10
"""Bytes of a sequence whose offsets datatrove can write."""
SPARE_FILES = 64
"""Further files that a process has open."""


@frozen
class Need:
    """What a phase needs."""

    bytes: int
    """Of all its tasks at the same time."""
    files: int
    """Open files of each task."""
    why: str
    """What the bytes are for."""
    fix: str
    """What reduces them."""


def available(limit_gb: float) -> int:
    """Returns bytes that may be used: the table's limit, or what the machine and its control group leave."""
    if limit_gb:
        return int(limit_gb * GB)
    # A container or a task of SLURM may have less than the machine
    group = MemoryGroup().limit()
    free = int(psutil.virtual_memory().available)
    return min(free, group) if group else free


def demand_room(phase: str, need: Need, limit_gb: float) -> None:
    """Refuse a phase that does not fit the machine.

    Raises:
        JobError: names the need, the memory of the machine, and what to change.
    """
    there = available(limit_gb)
    if need.bytes > there:
        raise JobError(
            f"dedup, {phase}: needs about {need.bytes / GB:.3g} GB ({need.why}), and {there / GB:.3g} GB are "
            f"available; {need.fix}, or run it on a machine with more"
        )
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if need.files + SPARE_FILES > allowed:
        raise JobError(
            f"dedup, {phase}: each task has {need.files:,} files of signatures open, and this machine allows "
            f"{allowed:,}; ulimit -n {need.files + SPARE_FILES}, or fewer tasks"
        )


def merging_need(files: int, size: int, lines: int, line_bytes: int, workers: int) -> Need:
    """Returns what tasks need that merge sorted files of signatures.

    Args:
        files: files that each task reads at the same time.
        size: bytes of these files together.
        lines: signatures of a file that are read at a time; -1: all.
        line_bytes: bytes of a signature.
        workers: tasks at the same time.
    """
    buffered = size if lines == -1 else min(size, files * lines * line_bytes)
    read = "in whole" if lines == -1 else f"{lines} lines at a time"
    each = f"{files:,} files of {size / max(files, 1) / 1e6:.3g} MB, {read}"
    return Need(
        bytes=workers * (files * FILE + buffered),
        files=files,
        why=f"{workers} tasks at the same time, each with {each}",
        fix="fewer workers" if lines != -1 else "lines_to_buffer = 5, or fewer workers",
    )


def clustering_need(pairs: int, documents: int) -> Need:
    """Returns what the task needs that joins pairs of duplicates to clusters."""
    # Each pair names two documents, and buckets find the same pair again
    nodes = min(2 * pairs, documents)
    return Need(
        bytes=nodes * NODE,
        files=1,
        why=f"{pairs:,} pairs of duplicates among {documents:,} documents, all in one task",
        fix="more hashes_per_bucket find fewer pairs; or divide the inputs",
    )


def suffixes_need(size: int) -> Need:
    """Returns what the task needs that finds repeated passages in a sequence of `size` bytes.

    Raises:
        JobError: datatrove's offsets cannot have such a size.
    """
    if size > MOST_SEQUENCE:
        raise JobError(
            f"dedup: the documents have {size / GB:.3g} GB of tokens, and datatrove's offsets of 32 bits end at "
            f"{MOST_SEQUENCE / GB:.3g} GB; divide the inputs, or use a tokenizer that makes fewer tokens"
        )
    # The suffix array has numbers of 4 bytes up to 2 GiB, and of 8 above, for each byte
    each = SUFFIXES if size < 1 << 31 else WIDE_SUFFIXES
    return Need(
        bytes=size * each + CHUNKS,
        files=1,
        why=f"a suffix array of {size / 1e6:,.3g} MB of tokens: {each} bytes for each, all in one task",
        fix="divide the inputs, or use a tokenizer that makes fewer tokens",
    )


def signatures_need(signatures: str, lines: int, line_bytes: int, workers: int) -> Need:
    """Returns what a phase needs that merges the signatures in the folders of a folder; see `merging_need`."""
    # Buckets have as many signatures each, but files of a rank may be empty
    return max(
        (merging_need(len(sizes), sum(sizes), lines, line_bytes, workers) for sizes in _sizes(signatures)),
        key=lambda need: need.bytes,
        default=merging_need(0, 0, lines, line_bytes, workers),
    )


def clusters_need(signatures: str, pairs: str, line_bytes: int) -> Need:
    """Returns what the phase needs that makes clusters of the pairs in a folder; see `clustering_need`."""
    # 4 numbers of 4 bytes for each pair
    count = sum(path.stat().st_size for path in Path(pairs).glob("*.dups")) // 16
    bucket = next(iter(_sizes(signatures)), [])
    return clustering_need(count, sum(bucket) // line_bytes)


def sequences_need(sequences: str) -> Need:
    """Returns what the phase needs that finds repeated passages in the sequences of a folder."""
    return suffixes_need(sum(path.stat().st_size for path in Path(sequences).glob("*.es_sequence")))


def _sizes(folder: str) -> list[list[int]]:
    folders = sorted(path for path in Path(folder).iterdir() if path.is_dir())
    return [[file.stat().st_size for file in each.iterdir()] for each in folders]


@define(kw_only=True, slots=False, eq=False, repr=False)
class MemoryGuard(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """First step of a phase that reads files of an earlier one: refuses it if they need more than the machine has.

    It is part of the phase, so that it measures the machine that runs the task, and the files as they are.
    """

    phase: str
    need: Callable[[], Need]
    """Returns what the phase needs, by the files that there are."""
    limit_gb: float

    name = "memory"
    type = "check"

    def __attrs_post_init__(self) -> None:
        """Makes the statistics that datatrove saves."""
        PipelineStep.__init__(self)

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Passes nothing on, which the steps of datatrove that read files demand."""
        del data, rank, world_size
        need = self.need()
        self.stat_update("bytes", value=need.bytes)
        demand_room(self.phase, need, self.limit_gb)
