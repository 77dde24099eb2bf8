"""Check that every id is in the vocabulary.

A token file of Forge was checked when it was written, and says with which vocabulary. Every id of any other file is
read once; the result is cached for as long as the file does not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from forge_core.contracts.errors import Problem
from forge_kit.cache import cached_folder, digest_of
from forge_plugin_memmap.index import FORMAT, GROUP, blocks
from forge_plugin_memmap.shards import Shard


def id_problems(shards: Iterable[Shard], limit: int | None) -> Iterator[Problem]:
    """Yields the first id of each shard that is negative or not below `limit` (None: there is no limit)."""
    for shard in shards:
        least, greatest = _possible(shard)
        if least >= 0 and (limit is None or greatest < limit):
            continue
        least, greatest = _range(shard)
        if least < 0 or (limit is not None and greatest >= limit):
            yield Problem("", _describe(shard, limit))


def _possible(shard: Shard) -> tuple[int, int]:
    """Returns bounds on the ids of a shard that are known without reading it."""
    kind = np.iinfo(shard.dtype)
    return (0, shard.vocab_size - 1) if shard.vocab_size is not None else (int(kind.min), int(kind.max))


def _range(shard: Shard) -> tuple[int, int]:
    """Returns the least and the greatest id of a shard."""

    def make(_folder: Path) -> Mapping[str, int]:
        ranges = [(int(ids.min()), int(ids.max())) for _, ids in blocks(shard)]
        return {"least": min(least for least, _ in ranges), "greatest": max(greatest for _, greatest in ranges)}

    info = cached_folder(GROUP, digest_of("range", FORMAT, shard.cache_key()), make).info
    return info["least"], info["greatest"]


def _describe(shard: Shard, limit: int | None) -> str:
    place, id_ = _first_beyond(shard, limit)
    message = f"{shard.path}: token {place} is {id_}"
    if id_ < 0:
        return f"{message}, and ids are not negative; correct format and dtype, or the file"
    fix = "set model.vocab_size, or correct format and dtype"
    return f"{message}, beyond the vocabulary of {limit} ids; {fix}"


def _first_beyond(shard: Shard, limit: int | None) -> tuple[int, int]:
    for start, ids in blocks(shard):
        beyond = np.flatnonzero((ids < 0) | (False if limit is None else ids >= limit))
        if len(beyond):
            return start + int(beyond[0]), int(ids[beyond[0]])
    raise AssertionError(f"{shard.path} has no such id")
