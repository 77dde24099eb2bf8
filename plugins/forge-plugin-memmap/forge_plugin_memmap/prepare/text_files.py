"""Text files and JSON lines, plain or compressed: one document a file, or one a line."""

from __future__ import annotations

import codecs
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_plugin_memmap.prepare.documents import (
    BLOCK,
    Drop,
    Fields,
    Place,
    Read,
    Ready,
    Text,
    kept_value,
    pieces,
    utf8_size,
)

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
BYTE_ORDER_MARK = "\ufeff"


@frozen
class Lines:
    """Whole lines of a file."""

    name: str
    first: int
    """Number of the first line, counted from 1."""
    data: bytes
    fields: Fields
    after: int = 0
    """Byte of the file from which lines are counted, where a part begins within it."""

    def documents(self) -> Iterator[Text | Drop]:
        """Parses each line; places are `NAME:LINE`, from 1."""
        for number, line in enumerate(io.BytesIO(self.data), self.first):
            where = Place(self.name, number, self.after)
            yield parse_line(line, where, self.fields, is_first=number == 1 and not self.after)


def read_lines(path: str, fields: Fields, at: Mapping[str, int], end: Mapping[str, int]) -> Iterator[Read]:
    """Yields the lines of a file between two places: the decompressed bytes and the lines before each.

    If there is an `end`, the last item is without lines and begins there.
    """
    start, line, stop = at.get("byte", 0), at.get("line", 1), end.get("byte")
    # Lines before a part of a file are not counted, since it would have to be read for that
    after = {"after": at["after"]} if "after" in at else {}
    with opened(path) as stream:
        stream.skip(start)
        passed = stream.passed()
        for data in _whole_lines(stream):
            inside = data if stop is None else data[: stop - start]
            # `passed` is from before this block was read: the position is where the block begins.
            here = {"byte": start, "line": line, **after}
            yield Read(here, passed, Lines(path, line, inside, fields, **after), len(inside))
            start, line, passed = start + len(inside), line + inside.count(b"\n"), stream.passed()
            if start == stop:
                break
    if stop is not None:
        yield Read({"byte": start, "line": line, **after}, stop, Lines(path, line, b"", fields, **after), 0)


def cut_lines(path: str, byte: int) -> Mapping[str, int]:
    """Returns the place of the first line that begins at or after a byte of a file that is not compressed."""
    with opened(path) as stream:
        # From the byte before: if that ends a line, the next one begins here
        stream.skip(byte - 1)
        place = byte - 1
        while data := stream.read(BLOCK):
            if end := data.find(b"\n") + 1:
                place += end
                break
            place += len(data)
    return {"byte": place, "line": 1, "after": place}


def _whole_lines(stream: Stream) -> Iterator[bytes]:
    """Yields the bytes of a stream in blocks of whole lines; a line longer than `BLOCK` is not divided."""
    parts: list[bytes] = []
    while block := stream.read(BLOCK):
        end = block.rfind(b"\n") + 1
        if end:
            yield b"".join([*parts, block[:end]])
            parts = []
        parts += [block[end:]] if end < len(block) else []
    if parts:
        yield b"".join(parts)


def parse_line(line: bytes, where: Place, fields: Fields, is_first: bool = False) -> Text | Drop:
    """Returns the document of a line, without a byte-order mark before the first one."""
    try:
        text = line.decode().rstrip("\r\n")
        record = json.loads(text.removeprefix(BYTE_ORDER_MARK) if is_first else text)
    except UnicodeDecodeError as error:
        return Drop(where, "not UTF-8", f"byte {error.start} of the line, 0x{line[error.start]:02x}: {error.reason}")
    except (ValueError, RecursionError) as error:
        # A RecursionError comes from brackets that are nested thousands deep
        blank = not text.strip(BYTE_ORDER_MARK + " \t\r\n")
        return Drop(where, "empty", "blank line") if blank else Drop(where, "not JSON", f"{error}: {_excerpt(text)}")
    if not isinstance(record, dict):
        return Drop(where, "not an object", _excerpt(text))
    if fields.text not in record:
        return Drop(where, "no field", f"its keys: {_excerpt(', '.join(record))}")
    # Most inputs have none of them: without a tuple of nothing for each document
    has_any = any(name in record for name in fields.kept)
    kept = tuple(kept_value(record.get(name)) for name in fields.kept) if has_any else ()
    return text_of(record[fields.text], where, kept)


def text_of(value: Any, where: Place, kept: tuple[bytes, ...] = ()) -> Text | Drop:
    """Returns the document that a value holds, with its kept values, or why it is none."""
    if not isinstance(value, str):
        return Drop(where, "not a string", _excerpt(json.dumps(value)))
    if not value:
        return Drop(where, "empty", "")
    try:
        return Text(where, value, utf8_size(value), kept=kept)
    except UnicodeEncodeError as error:  # JSON can escape half a surrogate pair, which no UTF-8 stands for
        return Drop(where, "not UTF-8", f"character {error.start} is half a surrogate pair")


def _excerpt(text: str, length: int = 60) -> str:
    # Cut before the split, as a line may have megabytes
    text = " ".join(text[: 2 * length].split())
    return text if len(text) <= length else text[:length] + "…"


def read_text(path: str, fields: Fields, at: Mapping[str, int], end: Mapping[str, int]) -> Iterator[Read]:
    """Yields the document of a file from a place on: the characters before it. A file that is not UTF-8 is dropped."""
    del fields, end  # of JSON lines and Parquet; the readers of all formats have the same arguments
    start = at.get("character", 0)
    # The process that began the file has read all of it
    fault = None if start else _fault(path)
    if fault is not None:
        yield Read({}, 0, Ready(fault), 0)
        return
    with opened(path) as stream:
        place = passed = 0
        for piece, is_last in pieces(decoded(stream)):
            if place >= start:
                text = piece if place else piece.removeprefix(BYTE_ORDER_MARK)
                size = utf8_size(text)
                item = Ready(Text(Place(path), text, size, is_last, is_first=place == 0))
                yield Read({"character": place}, passed, item, size)
            place, passed = place + len(piece), stream.passed()


def decoded(stream: Stream) -> Iterator[str]:
    """Yields the text of a stream, block by block.

    Raises:
        UnicodeDecodeError: the text is not UTF-8; its `start` is the offset in the whole stream.
    """
    decoder, place = codecs.getincrementaldecoder("utf-8")(), 0
    while True:
        data = stream.read(BLOCK)
        waiting = len(decoder.getstate()[0])
        try:
            yield decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            # The decoder may hold the first bytes of a character from the block before.
            error.start += place - waiting
            raise
        place += len(data)
        if not data:
            return


def _fault(path: str) -> Drop | None:
    """Returns why a file yields no document, if it does not."""
    # Read to its end first: a file that turns out not to be UTF-8 must not have been written in part.
    characters = 0
    with opened(path) as stream:
        try:
            for number, text in enumerate(decoded(stream)):
                characters += len(text if number else text.removeprefix(BYTE_ORDER_MARK))
        except UnicodeDecodeError as error:
            return Drop(Place(path), "not UTF-8", f"byte {error.start}: {error.reason}")
    return None if characters else Drop(Place(path), "empty", "")


# --- the bytes of a file -----------------------------------------------------------------------------------------


class Stream:
    """The bytes of a file, to be read in order."""

    def __init__(self, raw: Any, bytes_: Any) -> None:
        self._raw, self._bytes = raw, bytes_

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end."""
        data: bytes = self._bytes.read(size)
        return data

    def skip(self, size: int) -> None:
        """Pass over `size` bytes."""
        if self._bytes is self._raw:
            # Only plain files: compressed ones must be read from their beginning
            self._raw.seek(size, os.SEEK_CUR)
            return
        while size and (data := self.read(min(size, 1 << 20))):
            size -= len(data)

    def passed(self) -> int:
        """Bytes of the file that have been read, as they lie on disk."""
        return int(self._raw.tell())


@contextmanager
def opened(path: str) -> Iterator[Stream]:
    """Open an input.

    Raises:
        JobError: it cannot be read, or its compressed data is damaged.
    """
    compression = COMPRESSIONS.get(os.path.splitext(path)[1])
    with _named(path, compression), open(path, "rb") as raw:
        yield Stream(raw, _decompressed(raw, compression) if compression else raw)


@contextmanager
def _named(path: str, compression: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is None and compression:  # of pyarrow, about what it decompresses
            raise JobError(f"{path}: damaged {compression} data ({error}); make the file again") from error
        raise JobError(f"{path}: cannot be read ({error.strerror or error})") from error


def _decompressed(raw: BinaryIO, compression: str) -> Any:
    import pyarrow

    # By pyarrow, which has both formats: Python has no zstd before 3.14
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), compression)
