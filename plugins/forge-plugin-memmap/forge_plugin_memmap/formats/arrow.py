"""Format `arrow`: a column of ids in files or streams of Arrow, as `datasets` of Hugging Face writes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_plugin_memmap.formats.columns import ColumnDocuments, ColumnFormat, arrow_batch, arrow_columns, arrow_width
from forge_plugin_memmap.formats.kind import Candidate
from forge_plugin_memmap.remote import is_remote, open_file

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"ARROW1"
"""Of a file; a stream begins with the mark of a message."""
MARK = b"\xff\xff\xff\xff"
END = MARK + bytes(4)
"""The message without contents that ends a stream."""


@frozen
class ArrowDocuments(ColumnDocuments):
    """The rows of a file or a stream."""

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
        """See `PackedDocuments`."""
        row = 1
        with _opened(self.path) as (_, record_batches):
            for batch in record_batches:
                # Arrow does not check what it maps, and would read outside of a damaged buffer
                batch.validate(full=True)
                yield arrow_batch(self.path, row, [batch.column(key) for key in self.keys])
                row += len(batch)


@frozen(kw_only=True)
class Arrow(ColumnFormat):
    """Arrow files and streams with a column of ids."""

    def suffixes(self) -> tuple[str, ...]:
        """Of Arrow."""
        return (".arrow",)

    def is_file(self, file: Candidate) -> bool:
        """By the magic of a file; a stream has none but its first message, so its name has to be `.arrow`."""
        return file.head.startswith(MAGIC) or (file.head.startswith(MARK) and file.path.endswith(".arrow"))

    def columns(self, file: Candidate) -> dict[str, bool]:
        """By the schema in the footer, or in the first message."""
        with _opened(file.path) as (schema, _):
            return arrow_columns(schema)

    def documents(self, file: Candidate) -> ArrowDocuments:
        """The rows."""
        if file.head.startswith(MARK):
            with open_file(file.path) as stream:
                stream.seek(-len(END), 2)
                # A stream that was cut between two messages reads as a shorter one
                if stream.read() != END:
                    raise JobError(f"{file.path}: the stream of Arrow has no end: it was cut short")
        keys = (self.column, *([self.mask_column] if self.mask_column else []))
        with _opened(file.path) as (schema, _):
            return ArrowDocuments(file.absolute, keys, arrow_width(schema, self.column))


@contextmanager
def _opened(path: str) -> Iterator[tuple[Any, Iterator[Any]]]:
    """The schema, and the batches."""
    import pyarrow
    from pyarrow import ipc

    try:
        with pyarrow.PythonFile(open_file(path), "r") if is_remote(path) else pyarrow.OSFile(path) as source:
            if source.read(len(MAGIC)) == MAGIC:
                reader = ipc.open_file(source)
                yield reader.schema, (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                source.seek(0)
                stream = ipc.open_stream(source)
                yield stream.schema, iter(stream)
    # Of names that are no UTF-8, and schemas of types that do not exist, too
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        raise JobError(f"{path}: cannot be read as Arrow ({error}): it is damaged") from error
