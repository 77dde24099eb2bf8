"""Format `raw`: nothing but ids, of a type that the job states."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_plugin_memmap.formats.auto import installed_formats
from forge_plugin_memmap.formats.kind import Candidate, TokenFormat
from forge_plugin_memmap.formats.plain_index import plain_index
from forge_plugin_memmap.shards import Shard

Dtype = Literal["uint8", "uint16", "uint32", "uint64", "int16", "int32", "int64"]


@frozen(kw_only=True)
class Raw(TokenFormat):
    """Nothing but ids, little-endian. Nothing in a file shows it, so the job states it."""

    in_auto = False

    dtype: Dtype
    """Type of the ids."""

    def suffixes(self) -> tuple[str, ...]:
        """Of a folder: plain ids have these names in most places."""
        return (".bin", ".npy")

    def recognises(self, file: Candidate) -> bool:
        """Any file: the job states that it is raw."""
        return True

    def shard(self, file: Candidate) -> Shard:
        """Raises `JobError` where a header shows another format, or the size is no multiple of an id's."""
        import numpy as np

        # Read as raw ids, a header would become the first few tokens.
        for type_, format in installed_formats().items():
            if format.has_header and format.recognises(file):
                message = f"{file.path} is of format {type_}, and describes its own contents"
                raise JobError(f'{message}; leave out format = {{ type = "raw" }}')
        # Whatever the machine's order is: files move between machines
        little = np.dtype(self.dtype).newbyteorder("<")
        if file.size % little.itemsize:
            message = f"{file.path} has {file.size} bytes, which {self.dtype} ids"
            raise JobError(f"{message} of {little.itemsize} bytes do not divide")
        tokens = file.size // little.itemsize
        return Shard(file.absolute, little.str, 0, tokens, **plain_index(file, tokens))
