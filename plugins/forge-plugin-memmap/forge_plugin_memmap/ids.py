"""Check that every id is in the vocabulary.

A token file of Forge was checked when it was written, and states the size of its vocabulary. Every id of any other
file is read once; the result is cached for as long as these files do not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forge_core.contracts.errors import Problem
from forge_kit.data.cache import Progress, cached_folder, digest_of
from forge_plugin_memmap.index import FORMAT, GROUP, blocks
from forge_plugin_memmap.remote import is_remote
from forge_plugin_memmap.shards import Shard


def id_problems(shards: Iterable[Shard], limit: int | None) -> Iterator[Problem]:
    """Yields the first id of each shard that is negative or not below `limit` (None: there is no limit)."""
    # Most files need no look: their header, or their dtype, bounds the ids.
    # Ids of remote files are compared when they are read: all at once, the whole corpus would be downloaded
    near = (shard for shard in shards if not is_remote(shard.path))
    unknown = [shard for shard in near if not _fit(_possible(shard), limit)]
    for shard, ids in zip(unknown, _ranges(unknown), strict=True):
        if not _fit(ids, limit):
            yield Problem("", _describe(shard, limit))


def _fit(ids: Sequence[int], limit: int | None) -> bool:
    """Whether all ids from the least to the greatest are in the vocabulary."""
    least, greatest = ids
    return least >= 0 and (limit is None or greatest < limit)


def _possible(shard: Shard) -> tuple[int, int]:
    """Returns bounds on the ids of a shard that are known without reading it."""
    kind = np.iinfo(shard.dtype)
    return (0, shard.vocab_size - 1) if shard.vocab_size is not None else (int(kind.min), int(kind.max))


def _ranges(shards: Sequence[Shard]) -> Sequence[Sequence[int]]:
    """Returns the least and the greatest id of each shard.

    All are in one folder of the cache: one for each of 10,000 shards would cost more than reading the list. A process
    that dies while it reads them leaves what it has found to the next one.
    """
    if not shards:
        return []

    def make(folder: Path) -> Mapping[str, Any]:
        progress = Progress(folder)
        ranges: list[tuple[int, int]] = [*progress.state.get("ranges", ())]
        for shard in shards[len(ranges) :]:
            found = [(int(ids.min()), int(ids.max())) for _, ids in blocks(shard)]
            # The range and not a verdict, so that the cache serves any vocabulary
            ranges.append((min(least for least, _ in found), max(greatest for _, greatest in found)))
            if progress.is_due:
                progress.save({"ranges": ranges})
        progress.finish()
        return {"ranges": ranges}

    # Of the whole list: with a shard more or less the key is another one, and all are read again
    key = digest_of("ranges", FORMAT, [shard.cache_key() for shard in shards])
    return cached_folder(GROUP, key, make, resumable=True).info["ranges"]


def _describe(shard: Shard, limit: int | None) -> str:
    place, id_ = _first_beyond(shard, limit)
    message = f"{shard.name}: token {place} is {id_}"
    if id_ < 0:
        return f"{message}, and ids are not negative; correct the format, or the file"
    fix = "set model.vocab_size, or correct the format"
    return f"{message}, beyond the vocabulary of {limit} ids; {fix}"


def _first_beyond(shard: Shard, limit: int | None) -> tuple[int, int]:
    for start, ids in blocks(shard):
        beyond = np.flatnonzero((ids < 0) | (False if limit is None else ids >= limit))
        if len(beyond):
            return start + int(beyond[0]), int(ids[beyond[0]])
    raise AssertionError(f"{shard.path} has no such id")
