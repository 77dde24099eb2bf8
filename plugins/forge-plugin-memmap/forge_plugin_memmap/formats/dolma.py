"""Format `dolma`: `.npy` without a header, and `.csv.gz`, of Dolma and OLMo (`tokenizer/memmap_writer.py`).

A row of the table is a document: its first token, its end, its id, its source and its place there. Nothing states the
type of the ids, which follows from the size of the file and the end of the last document.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TextIO

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_kit.data.origins import Origin
from forge_plugin_memmap.formats.kind import Candidate, TokenFormat
from forge_plugin_memmap.formats.npy import MAGIC
from forge_plugin_memmap.remote import is_remote, open_file, remote_stamp
from forge_plugin_memmap.shards import Shard

if TYPE_CHECKING:
    import numpy as np

TABLE = ".csv.gz"
WIDTHS = {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8"}
DTYPES = {"uint8": "|u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8"}
SMALL = 1 << 16
"""Bytes of a table that is decompressed at once."""
ROWS = 1 << 16
"""Documents that are read at a time."""


@frozen
class TableEnds:
    """Where documents end, by the rows of a table."""

    path: str

    def blocks(self) -> Iterator[np.ndarray]:
        """Raises `JobError` where the table is damaged, or a document does not begin where the one before ends."""
        import numpy as np

        ends: list[int] = []
        for end in _row_ends(self.path):
            ends.append(end)
            if len(ends) == ROWS:
                yield np.array(ends)
                ends = []
        if ends:
            yield np.array(ends)


@frozen
class TableOrigins:
    """Where documents come from, by the rows of a table: their id, source, and place there."""

    path: str

    def read(self, numbers: np.ndarray) -> list[Origin | None]:
        """Reads all rows up to the last that is asked for, as a compressed table has no beginning but its first."""
        wanted = iter(numbers.tolist())
        number = next(wanted, None)
        found: list[Origin | None] = []
        for row, cells in enumerate(_rows(self.path)):
            if row == number:
                found.append(_origin(cells))
                number = next(wanted, None)
            if number is None:
                break
        return found


def _origin(cells: Sequence[str]) -> Origin | None:
    """The origin in a row: columns after the tokens are id, source and line, which older tables lack."""
    id_, source, line = [*cells[2:5], "", "", ""][:3]
    # Dolma counts the documents of a source from 1, and writes 0 or nothing where it does not know
    place = int(line) if line.isdecimal() and int(line) else None
    return Origin(source, place, {"id": id_} if id_ else {}) if source or id_ else None


@frozen(kw_only=True)
class Dolma(TokenFormat):
    """`NAME.npy` of Dolma and OLMo, which has no header in spite of its name, with its `NAME.csv.gz`."""

    # Raw ids are all that the file has: to read it as `raw` is not wrong, but searches for documents
    has_header = False
    index = (TABLE, ".npy")

    dtype: Literal["uint8", "uint16", "uint32", "uint64"] | None = None
    """Type of the ids. By default it follows from the size of the file and the last row of its table, which has to be
    read at each start: about a second for a million documents."""

    def suffixes(self) -> tuple[str, ...]:
        """Of the ids."""
        return (".npy",)

    def recognises(self, file: Candidate) -> bool:
        """By the table beside it, and by what it has not: the header of numpy."""
        return file.path.endswith(".npy") and not file.head.startswith(MAGIC) and file.has(file.beside(TABLE))

    def refusal(self, file: Candidate) -> str:
        """Without a table."""
        table = file.beside(TABLE)
        if not file.path.endswith(".npy") or file.has(table):
            return ""
        return f"{os.path.basename(table)} is not beside it, which lists its documents"

    def shard(self, file: Candidate) -> Shard:
        """Raises `JobError` where the table is damaged, or of other data."""
        table = file.beside(TABLE)
        dtype = DTYPES[self.dtype] if self.dtype else self._dtype(file, table)
        tokens, rest = divmod(file.size, int(dtype[-1]))
        if rest:
            raise JobError(f"{file.path} has {file.size} bytes, which {self.dtype} ids do not divide")
        ends, origins = TableEnds(table), TableOrigins(table)
        return Shard(file.absolute, dtype, 0, tokens, ends=ends, origins=origins, stamps=file.stamps([table]))

    def _dtype(self, file: Candidate, table: str) -> str:
        # All rows are read, as a compressed file cannot be read from its end
        last = deque(_row_ends(table), maxlen=1)
        tokens = last[0] if last else 0
        if not tokens:
            raise JobError(f"{table} lists no documents")
        width, rest = divmod(file.size, tokens)
        if rest or width not in WIDTHS:
            message = (
                f"{table} ends at token {tokens}, but {file.path} has {file.size} bytes, not 1, 2, 4 or 8 for each"
            )
            raise JobError(f"{message}: it was cut short, or the table is of other data")
        return WIDTHS[width]


def _text(path: str) -> TextIO:
    """The table, decompressed."""
    # All at once where it is small: a stream costs as much as 10,000 small tables take together
    size = remote_stamp(path)[0] if is_remote(path) else os.path.getsize(path)
    if size <= SMALL:
        with open_file(path) as file:
            # Not translated, as a quoted source may have any line break
            return io.StringIO(gzip.decompress(file.read()).decode(), newline="")
    # By a file of ours where it is remote; gzip closes its own
    source = open_file(path) if is_remote(path) else path
    return gzip.open(source, "rt", encoding="utf-8", newline="")


def _row_ends(path: str) -> Iterator[int]:
    return (int(row[1]) for row in _rows(path))


def _rows(path: str) -> Iterator[Sequence[str]]:
    """Yields the row of each document that has tokens."""
    last = 0
    try:
        with _text(path) as file:
            for row in csv.reader(file):
                first, end = int(row[0]), int(row[1])
                if first != last or end < first:
                    message = f"{path}: a document of tokens {first} to {end} follows token {last}"
                    raise JobError(f"{message}, and documents lie one after the other; it is damaged")
                # A document without tokens is none
                if end > last:
                    yield row
                last = end
    # Damage shows in the compression, in the text, or in the rows
    except (EOFError, gzip.BadGzipFile, zlib.error, ValueError, IndexError, csv.Error) as error:
        raise JobError(f"{path}: is not a table of documents ({error}); it is damaged") from error
