"""Format `forge`: token files that `forge-run data prepare` wrote."""

from __future__ import annotations

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_plugin_memmap.formats.kind import Candidate, TokenFormat
from forge_plugin_memmap.formats.plain_index import plain_index
from forge_plugin_memmap.shards import Shard

MAGIC = b"FORGETOK"


@frozen(kw_only=True)
class ForgeTokens(TokenFormat):
    """Files with Forge's header (see `forge_kit.data.token_file`), and what lies beside them."""

    def suffixes(self) -> tuple[str, ...]:
        """Of `data prepare`."""
        return (".bin",)

    def recognises(self, file: Candidate) -> bool:
        """By the first eight bytes."""
        return file.head.startswith(MAGIC)

    def refusal(self, file: Candidate) -> str:
        """A file that was not finished begins with zeros."""
        return "" if any(file.head[: len(MAGIC)]) else "its header is missing, as of a file that was not finished"

    def shard(self, file: Candidate) -> Shard:
        """Raises `JobError` where the size of a file does not match the header."""
        from forge_kit.data.token_file import HEADER, parse_header

        header = parse_header(file.path, file.head[: HEADER.size], file.size)
        facts = header.vocab_size, header.end_of_text, header.text_bytes
        if not header.tokens:
            raise JobError(f"{file.path} has no tokens; leave it out, or provide its data")
        # By its header the number of documents is known, which other files with such an index do not state
        beside = plain_index(file, header.tokens, header.documents)
        return Shard(file.absolute, header.dtype.str, HEADER.size, header.tokens, *facts, **beside)
