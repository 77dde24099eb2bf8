"""Memory and open files that a phase of deduplication needs, compared with the machine before it starts.

datatrove checks neither: machines have hung for a day in the second stage of MinHash (datatrove#222, #298). The figures
are upper bounds, which the tests compare with what datatrove's steps take.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import psutil
from attrs import define, field, frozen
from attrs.validators import in_
from datatrove.pipeline.base import PipelineStep

from forge_core.contracts.errors import JobError
from forge_kit.tools.control_group import MemoryGroup

GB = 10**9
FILE = 10_000
"""Bytes for each open file of signatures, in addition to the signatures that are read at a time."""
NODE = 280
"""Bytes for each document that has a duplicate, when clusters are made: its place in two dictionaries and a list."""
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


@define(kw_only=True, slots=False, eq=False, repr=False)
class MemoryGuard(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """First step of a phase that reads files of an earlier one: refuses it if they need more than the machine has.

    It is part of the phase, so that it measures the machine that runs the task, and the files as they are.
    """

    phase: str
    kind: str = field(validator=in_(("merging", "clustering")))
    signatures: str
    """Folder of the signatures, with a folder for each task that merges some."""
    workers: int
    lines: int
    line_bytes: int
    limit_gb: float
    pairs: str = ""
    """Folder of the pairs that were found; of `clustering`."""

    name = "memory"
    type = "check"

    def __attrs_post_init__(self) -> None:
        """Makes the statistics that datatrove saves."""
        PipelineStep.__init__(self)

    def need(self) -> Need:
        """Returns what the phase needs, by the files that there are."""
        folders = sorted(path for path in Path(self.signatures).iterdir() if path.is_dir())
        sizes = [[file.stat().st_size for file in folder.iterdir()] for folder in folders]
        if self.kind == "merging":
            # Buckets have as many signatures each, but files of a rank may be empty
            return max(
                (merging_need(len(own), sum(own), self.lines, self.line_bytes, self.workers) for own in sizes),
                key=lambda need: need.bytes,
                default=merging_need(0, 0, self.lines, self.line_bytes, self.workers),
            )
        # 4 numbers of 4 bytes for each pair
        pairs = sum(path.stat().st_size for path in Path(self.pairs).glob("*.dups")) // 16
        return clustering_need(pairs, sum(sizes[0]) // self.line_bytes if sizes else 0)

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Passes nothing on, which the steps of datatrove that read files demand."""
        del data, rank, world_size
        need = self.need()
        self.stat_update("bytes", value=need.bytes)
        demand_room(self.phase, need, self.limit_gb)
