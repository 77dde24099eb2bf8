"""Documents whose ids do not lie together in their files, unpacked once into the cache.

One folder of the cache holds all files of a corpus, one after the other: `ids`, `ends` (of each document in its shard,
int64) and, if any file has masks, `learned`. It is made again when a file changes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from forge_core import report_progress
from forge_core.contracts.errors import JobError
from forge_kit.data.block_sums import SUFFIX
from forge_kit.data.cache import CachedFolder, Progress, cached_folder, digest_of
from forge_plugin_memmap.index import GROUP
from forge_plugin_memmap.shards import ListedEnds, Mask, Shard, stamp_of, without_empty

FORMAT = 1
"""Part of the key in the cache: raise it when the same files give other contents."""
IDS, ENDS, LEARNED = "ids", "ends", "learned"


def unpacked(shards: Sequence[Shard]) -> list[Shard]:
    """Returns the shards, those that are packed as they lie in the cache.

    Raises:
        JobError: a file is damaged, or has an id that is negative or needs more than four bytes.
    """
    packed = [shard for shard in shards if shard.packed]
    if not packed:
        return list(shards)
    # In their order among the shards that are read where they lie
    parts = iter(_shards(packed, _folder(packed)))
    return [next(parts) if shard.packed else shard for shard in shards]


def _folder(packed: Sequence[Shard]) -> CachedFolder:
    key = digest_of("unpacked", FORMAT, [shard.cache_key() for shard in packed])
    return cached_folder(GROUP, key, lambda folder: _make(folder, packed), resumable=True, sums=True)


def _make(folder: Path, packed: Sequence[Shard]) -> Mapping[str, Any]:
    width = _width(packed)
    is_masked = _is_masked(packed)
    progress = Progress(folder)
    counts: list[dict[str, int]] = [*progress.state.get("counts", ())]
    sizes = {
        IDS: width * sum(count["tokens"] for count in counts),
        ENDS: 8 * sum(count["documents"] for count in counts),
        **({LEARNED: sum(count["tokens"] for count in counts)} if is_masked else {}),
    }
    with ExitStack() as stack:
        files = {name: stack.enter_context(_continued(folder / name, size)) for name, size in sizes.items()}
        for shard in packed[len(counts) :]:
            counts.append(_unpack(shard, files, width))
            if progress.is_due:
                # What the state counts must outlast a crash that the state itself does
                for file in files.values():
                    file.flush()
                    os.fsync(file.fileno())
                progress.save({"counts": counts})
    # Not by the manifest: the state is one of the files that it would list
    progress.finish()
    return {"counts": counts}


def _unpack(shard: Shard, files: Mapping[str, BinaryIO], width: int) -> dict[str, int]:
    assert shard.packed is not None
    tokens = documents = greatest = 0
    for ids, ends, learned in shard.packed.batches():
        report_progress(f"unpacking {shard.path}", tokens)
        # Documents without tokens are none, as in the indexes of other formats
        bounds = without_empty(0, ends)
        if len(ids):
            least, most = int(ids.min()), int(ids.max())
            if least < 0 or most >= 1 << 8 * width:
                bad = least if least < 0 else most
                raise JobError(f"{shard.path} has the id {bad}; ids are at least 0 and below {1 << 8 * width}")
            greatest = max(greatest, most)
        # Little-endian like every token file, though the cache is of one machine: readers then have one type
        files[IDS].write(ids.astype(f"<u{width}").tobytes())
        files[ENDS].write((bounds + tokens).astype("<i8").tobytes())
        if LEARNED in files:
            mask = np.ones(len(ids), bool) if learned is None else learned
            files[LEARNED].write(mask.astype(bool).tobytes())
        tokens += len(ids)
        documents += len(bounds)
    if not tokens:
        raise JobError(f"{shard.path} has no tokens; leave it out, or provide its data")
    return {"tokens": tokens, "documents": documents, "greatest": greatest}


def _shards(packed: Sequence[Shard], folder: CachedFolder) -> list[Shard]:
    width = _width(packed)
    names = [IDS, ENDS, *([LEARNED] if _is_masked(packed) else [])]
    paths = {name: str(folder.path / name) for name in names}
    # Sizes are enough: the folder has been compared with its manifest, and its key stands for the contents
    stamps = {path: stamp_of(os.stat(path)) for path in paths.values()}
    stamps |= {path + SUFFIX: stamp_of(os.stat(path + SUFFIX)) for path in paths.values()}
    shards = []
    first = documents = 0
    for shard, count in zip(packed, folder.info["counts"], strict=True):
        shards.append(
            Shard(
                paths[IDS],
                f"<u{width}",
                width * first,
                count["tokens"],
                vocab_size=count["greatest"] + 1,
                ends=ListedEnds(paths[ENDS], count["documents"], offset=8 * documents),
                mask=Mask(paths[LEARNED], first) if LEARNED in paths else None,
                origin=shard,
                summed=True,
                stamps=stamps,
            )
        )
        first += count["tokens"]
        documents += count["documents"]
    return shards


def _width(packed: Sequence[Shard]) -> int:
    return max(shard.packed.width for shard in packed if shard.packed)


def _is_masked(packed: Sequence[Shard]) -> bool:
    return any(shard.packed.is_masked for shard in packed if shard.packed)


def _continued(path: Path, size: int) -> BinaryIO:
    file = path.open("r+b" if size else "wb")
    file.truncate(size)
    file.seek(size)
    return file
