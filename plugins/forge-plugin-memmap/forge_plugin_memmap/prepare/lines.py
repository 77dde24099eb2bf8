"""JSON lines: one document a line."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

from forge_plugin_memmap.prepare.documents import Drop, Text, utf8_size
from forge_plugin_memmap.prepare.reading import BLOCK, Read
from forge_plugin_memmap.prepare.streams import Stream, opened

BYTE_ORDER_MARK = "\ufeff"


@frozen
class Lines:
    """Whole lines of a file."""

    name: str
    first: int
    """Number of the first line, counted from 1."""
    data: bytes
    field: str

    def documents(self) -> Iterator[Text | Drop]:
        for number, line in enumerate(io.BytesIO(self.data), self.first):
            yield parse_line(line, f"{self.name}:{number}", self.field, is_first=number == 1)


def read_lines(path: str, field: str, at: Mapping[str, int]) -> Iterator[Read]:
    """The lines of a file from a place on: the bytes, decompressed, and the lines before it."""
    start, line = at.get("byte", 0), at.get("line", 1)
    with opened(path) as stream:
        stream.skip(start)
        passed = stream.passed()
        for data in _whole_lines(stream):
            yield Read({"byte": start, "line": line}, passed, Lines(path, line, data, field), len(data))
            start, line, passed = start + len(data), line + data.count(b"\n"), stream.passed()


def _whole_lines(stream: Stream) -> Iterator[bytes]:
    """The bytes of a stream in blocks that end with a line; a line longer than a block is one of its own."""
    parts: list[bytes] = []
    while block := stream.read(BLOCK):
        end = block.rfind(b"\n") + 1
        if end:
            yield b"".join([*parts, block[:end]])
            parts = []
        parts += [block[end:]] if end < len(block) else []
    if parts:
        yield b"".join(parts)


def parse_line(line: bytes, where: str, field: str, is_first: bool = False) -> Text | Drop:
    """The document of a line. A byte-order mark before the first is passed over."""
    try:
        text = line.decode().rstrip("\r\n")
        record = json.loads(text.removeprefix(BYTE_ORDER_MARK) if is_first else text)
    except UnicodeDecodeError as error:
        return Drop(where, "not UTF-8", f"byte {error.start} of the line, 0x{line[error.start]:02x}: {error.reason}")
    except (ValueError, RecursionError) as error:
        blank = not text.strip(BYTE_ORDER_MARK + " \t\r\n")
        return Drop(where, "empty", "blank line") if blank else Drop(where, "not JSON", f"{error}: {_excerpt(text)}")
    if not isinstance(record, dict):
        return Drop(where, "not an object", _excerpt(text))
    if field not in record:
        return Drop(where, "no field", f"its keys: {_excerpt(', '.join(record))}")
    return text_of(record[field], where)


def text_of(value: Any, where: str) -> Text | Drop:
    """The document that a value is, if it is one."""
    if not isinstance(value, str):
        return Drop(where, "not a string", _excerpt(json.dumps(value)))
    if not value:
        return Drop(where, "empty", "")
    try:
        return Text(where, value, utf8_size(value))
    except UnicodeEncodeError as error:  # JSON can escape half a surrogate pair, which no UTF-8 stands for
        return Drop(where, "not UTF-8", f"character {error.start} is half a surrogate pair")


def _excerpt(text: str, length: int = 60) -> str:
    text = " ".join(text[: 2 * length].split())
    return text if len(text) <= length else text[:length] + "…"
