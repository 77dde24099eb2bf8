"""The hook `disk`."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define, field, frozen
from attrs.validators import gt

from forge_core.contracts.components import TrainingHook
from forge_plugin_resilience.goodput.words import size as size_words

if TYPE_CHECKING:
    from forge_core.contracts.contexts import CheckpointContext, TrainContext
    from forge_core.job import CheckpointSection

REMEMBERED = 20
"""Saves from which the rate is taken."""
FORESIGHT = 20.0
"""Times the time of observation for which a rate of others is believed."""


@define(kw_only=True, slots=False)
class Disk(TrainingHook):
    """Warns once, before the disk of the checkpoints is full, of the hour at which it will be at the present rate.

    After each save rank 0 compares free bytes and free inodes with what a checkpoint takes. What the run itself will
    add is known from what `[checkpoint]` keeps; what others add is measured.
    """

    resumes_as = "safe"

    hours: float = field(default=24.0, validator=gt(0))
    """How far ahead to look."""

    def on_train_begin(self, context: TrainContext) -> None:
        from forge_core.parallel.mesh import global_rank

        self._rank, self._warned = global_rank(), False
        self._samples: deque[Sample] = deque(maxlen=REMEMBERED)

    def on_checkpoint_save(self, context: CheckpointContext) -> None:
        """Look at the disk on rank 0 and warn if it will be full, once in this process."""
        if self._rank != 0 or self._warned:
            return
        sample = look(context.path, context.step)
        if sample is None:
            return
        self._samples.append(sample)
        text = forecast(self._samples, context.job.checkpoint, context.path.parent, 3600 * self.hours)
        if text:
            warnings.warn(text, stacklevel=2)
            self._warned = True


@frozen(kw_only=True)
class Sample:
    """The disk after a save. Amounts are pairs: bytes and files."""

    t: float
    step: int
    size: tuple[int, int]
    """Bytes and inodes of one checkpoint."""
    count: int
    """Checkpoints that are there."""
    free: tuple[int, int]
    """The second is infinite, as a large number, where the file system counts no files."""


def look(path: Path, step: int) -> Sample | None:
    """Look at the disk of the checkpoint at `path`; None if it is gone, or its storage keeps no files there."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return None
    size = size_of(path)
    # Some file systems, such as btrfs, make inodes as needed, and report 0 of 0
    files = disk.f_favail if disk.f_files else 1 << 62
    # Folders of unfinished saves have a suffix, which is no digit
    count = sum(other.name.partition("-")[2].isdigit() for other in path.parent.glob("step-*"))
    # Not `f_bfree`, which includes blocks that are reserved for root
    free = disk.f_bavail * disk.f_frsize, files
    return Sample(t=time.time(), step=step, size=size, count=count, free=free) if size[1] else None


def size_of(path: Path) -> tuple[int, int]:
    """Returns bytes and number of the files below a folder, itself and folders counted as files."""
    size, count = 0, 0
    for folder, _, names in os.walk(path):
        count += 1 + len(names)
        for name in names:
            with suppress(OSError):  # retention may delete it meanwhile
                size += os.lstat(os.path.join(folder, name)).st_size
    return size, count


def forecast(samples: Sequence[Sample], keeps: CheckpointSection, folder: Path, ahead: float) -> str:
    """Returns the warning that the disk will be full within `ahead` seconds; empty if it will not.

    It is full when the next checkpoint has no room, as an old one is deleted only when the next is there.
    """
    now = samples[-1]
    for kind, unit in enumerate(("bytes", "inodes")):
        # What others write is followed no further than twenty times the time for which it was seen
        seen = FORESIGHT * (now.t - samples[0].t)
        own, seconds = (_until_full(samples, keeps, kind, others) for others in (False, True))
        if own > ahead and seconds > min(ahead, seen):
            continue
        seconds = seconds if seconds <= seen else own
        need, free = _amount(now.size[kind], unit), _amount(now.free[kind], unit)
        facts = f"a checkpoint takes {need}, {free} are free in {folder}"
        advice = "free space, or lower checkpoint.keep"
        if seconds <= 0:
            return f"the disk has no room for another checkpoint: {facts}; {advice}"
        clock = datetime.fromtimestamp(now.t + seconds).strftime("%a %d %b, %H:%M")
        return f"the disk will be full about {clock}, in {seconds / 3600:.1f} h, at the present rate: {facts}; {advice}"
    return ""


def _until_full(samples: Sequence[Sample], keeps: CheckpointSection, kind: int, with_others: bool) -> float:
    """Returns the seconds until there is no room for the next checkpoint; infinite if there always will be."""
    first, now = samples[0], samples[-1]
    size, left = now.size[kind], float(now.free[kind] - now.size[kind])
    if left < 0:
        return 0.0
    if len(samples) < 2 or now.t <= first.t:
        return math.inf
    elapsed, steps = now.t - first.t, now.step - first.step
    # What our own checkpoints took in the meantime is no rate of others
    own = (now.count - first.count) * size
    others = max(0.0, (first.free[kind] - now.free[kind] - own) / elapsed) if with_others else 0.0
    each = elapsed / (len(samples) - 1)
    if keeps.keep == 0:
        return _time_of(left, others + size / each)
    lasting = size * steps / keeps.keep_every / elapsed if keeps.keep_every else 0.0
    # Until as many are there as are kept, each save takes room
    coming = max(0, keeps.keep + keeps.keep_best - now.count)
    filling = _time_of(left, others + size / each)
    if filling < coming * each:
        return filling
    return coming * each + _time_of(left - coming * (size + others * each), others + lasting)


def _time_of(left: float, rate: float) -> float:
    return left / rate if rate > 0 else math.inf


def _amount(count: int, unit: str) -> str:
    return size_words(count) if unit == "bytes" else f"{count:,} inodes"
