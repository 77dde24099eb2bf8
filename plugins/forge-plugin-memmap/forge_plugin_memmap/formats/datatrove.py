"""Format `datatrove`: `NAME.ds` and `NAME.ds.index` of datatrove (`pipeline/tokens/tokenizer.py`, as FineWeb's).

Beside the ids lie the end of each document (uint64), perhaps a mask of one byte for each token (`.loss`), and a text
whose lines are the tokenizer and the bytes of an id, the number of tokens, and the same for people (`.metadata`).
"""

from __future__ import annotations

import os
import struct

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_plugin_memmap.formats.kind import Candidate, TokenFormat, read_part
from forge_plugin_memmap.shards import ListedEnds, Mask, Shard, Stamp

INDEX, LOSS, METADATA = ".index", ".loss", ".metadata"
WIDTHS = {2: "<u2", 4: "<u4"}


@frozen(kw_only=True)
class Datatrove(TokenFormat):
    """`NAME.ds` of datatrove, with its `.index`, and its `.loss` as the mask."""

    has_header = False
    index = (".ds.index", ".ds")

    def suffixes(self) -> tuple[str, ...]:
        """Of the ids."""
        return (".ds",)

    def recognises(self, file: Candidate) -> bool:
        """By the index beside it."""
        return file.has(file.beside(INDEX, in_place=False))

    def refusal(self, file: Candidate) -> str:
        """Without an index."""
        if not file.path.endswith(".ds"):
            return ""
        return f"{os.path.basename(file.path)}{INDEX} is not beside it, which lists its documents"

    def shard(self, file: Candidate) -> Shard:
        """Raises `JobError` where sizes of files do not fit each other."""
        index, loss, metadata = (file.beside(suffix, in_place=False) for suffix in (INDEX, LOSS, METADATA))
        stamps = file.stamps([index, loss, metadata])
        before, tokens = _last_ends(index, stamps[index])
        # Only `.metadata` states the width, and it may be missing: sizes give it in any case
        width = file.size // tokens
        if file.size != width * tokens or width not in WIDTHS or before > tokens:
            message = f"{index} ends at token {tokens}, but {file.path} has {file.size} bytes, and ids have 2 or 4"
            raise JobError(f"{message}: it was cut short, or the index is of other data")
        if metadata in stamps:
            _check_metadata(metadata, width, tokens)
        if loss in stamps and stamps[loss][0] != tokens:
            raise JobError(f"{loss} has {stamps[loss][0]} bytes; it must have 1 for each of {tokens} tokens")
        ends = ListedEnds(index, stamps[index][0] // 8, "<u8", may_repeat=True)
        mask = Mask(loss) if loss in stamps else None
        return Shard(file.absolute, WIDTHS[width], 0, tokens, ends=ends, mask=mask, stamps=stamps)


def _last_ends(path: str, stamp: Stamp) -> tuple[int, int]:
    """The ends of the last two documents; 0 for one that there is not."""
    size = stamp[0]
    if size % 8 or not size:
        raise JobError(f"{path} has {size} bytes; it must have 8 for each document")
    # An index of a large shard has megabytes, and one of 10,000 shards is read at each start: two entries have to do
    before, last = struct.unpack("<QQ", read_part(path, 16, max(0, size - 16)).rjust(16, b"\0"))
    if not last:
        raise JobError(f"{path}: the last document ends at 0; it is damaged")
    return before, last


def _check_metadata(path: str, width: int, tokens: int) -> None:
    """Compare what `.metadata` states: the only place that states the bytes of an id."""
    # A name may have any characters; only what follows its last `|` matters
    first, second, *_ = [*read_part(path, 1 << 16).decode(errors="replace").splitlines(), "", ""]
    stated = first.rpartition("|")[2], second
    if stated != (str(width), str(tokens)):
        message = f"{path} states ids of {stated[0]} bytes, and {stated[1]} tokens; the files have {width} and {tokens}"
        raise JobError(f"{message}: they are of other data, or damaged")
