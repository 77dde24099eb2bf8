"""The index and the mask that Forge keeps beside a file of ids: `NAME.ends` and `NAME.learned`."""

from __future__ import annotations

from typing import Any

from forge_core.contracts.errors import JobError
from forge_plugin_memmap.formats.kind import Candidate
from forge_plugin_memmap.shards import ListedEnds, Mask

ENDS, LEARNED = ".ends", ".learned"


def plain_index(file: Candidate, tokens: int, documents: int | None = None) -> dict[str, Any]:
    """Returns `ends`, `mask` and `stamps` of a shard.

    Args:
        file: the file of ids.
        tokens: how many it has.
        documents: how many documents it has, if it states that.

    Raises:
        JobError: the size of a file does not fit.
    """
    ends, learned = file.beside(ENDS), file.beside(LEARNED)
    stamps = file.stamps([ends, learned])
    for path, unit, count, what in ((ends, 8, documents, "documents"), (learned, 1, tokens, "tokens")):
        if path not in stamps:
            continue
        size = stamps[path][0]
        if size % unit or size == 0 or count not in (None, size // unit):
            number = "its" if count is None else count
            raise JobError(f"{path} has {size} bytes; it must have {unit} for each of {number} {what}")
    return {
        "ends": ListedEnds(ends, stamps[ends][0] // 8) if ends in stamps else None,
        "mask": Mask(learned) if learned in stamps else None,
        "stamps": stamps,
    }
