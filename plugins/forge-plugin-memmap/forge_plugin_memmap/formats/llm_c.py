"""Format `llm_c`: `.bin` of llm.c and modded-nanogpt (`dev/data/data_common.py`, `data/fineweb.py`).

A header of 256 int32 (magic, version, number of tokens, and zeros), and then ids. There is no index: documents begin
with the end-of-text there, so the one of a document is the last id before it.
"""

from __future__ import annotations

import struct

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_plugin_memmap.formats.kind import Candidate, TokenFormat
from forge_plugin_memmap.formats.plain_index import plain_index
from forge_plugin_memmap.shards import Shard

HEAD = struct.Struct("<iii")
HEADER_BYTES = 1024
VARIANTS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""Version and dtype by magic: of GPT-2's tokenizer, and of Llama 3's."""


@frozen(kw_only=True)
class LlmC(TokenFormat):
    """`.bin` of llm.c and modded-nanogpt."""

    def suffixes(self) -> tuple[str, ...]:
        """Of the ids."""
        return (".bin",)

    def recognises(self, file: Candidate) -> bool:
        """By the magic, and the zeros that the rest of the header consists of."""
        head = file.head[:HEADER_BYTES]
        # Four bytes alone may be the first two ids of a raw file: 55432 and 308
        return len(head) == HEADER_BYTES and HEAD.unpack_from(head)[0] in VARIANTS and not any(head[HEAD.size :])

    def shard(self, file: Candidate) -> Shard:
        """Raises `JobError` for another version, or where the size does not match the header."""
        magic, version, tokens = HEAD.unpack_from(file.head)
        known, dtype = VARIANTS[magic]
        if version != known:
            raise JobError(f"{file.path}: version {version} of llm.c's header; version {known} can be read")
        expected = HEADER_BYTES + tokens * int(dtype[-1])
        if file.size != expected or tokens < 0:
            message = f"{file.path} has {file.size} bytes, but its header implies {expected} ({tokens} tokens)"
            raise JobError(f"{message}: it is damaged")
        return Shard(file.absolute, dtype, HEADER_BYTES, tokens, **plain_index(file, tokens))
