"""Text files: one document a file, however long."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping

from forge_plugin_memmap.prepare.documents import Drop, Ready, Text, pieces, utf8_size
from forge_plugin_memmap.prepare.lines import BYTE_ORDER_MARK
from forge_plugin_memmap.prepare.reading import BLOCK, Read
from forge_plugin_memmap.prepare.streams import Stream, opened


def read_text(path: str, field: str, at: Mapping[str, int]) -> Iterator[Read]:
    """The document of a file from a place on: the characters before it. A file that is not UTF-8 yields nothing.

    Args:
        field: means nothing here.
    """
    start = at.get("character", 0)
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
                yield Read({"character": place}, passed, Ready(Text(path, text, size, is_last)), size)
            place, passed = place + len(piece), stream.passed()


def decoded(stream: Stream) -> Iterator[str]:
    """The text of a stream, block by block.

    Raises:
        UnicodeDecodeError: its `start` is the place in the whole stream.
    """
    decoder, place = codecs.getincrementaldecoder("utf-8")(), 0
    while True:
        data = stream.read(BLOCK)
        waiting = len(decoder.getstate()[0])
        try:
            yield decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            error.start += place - waiting
            raise
        place += len(data)
        if not data:
            return


def _fault(path: str) -> Drop | None:
    """The reason that a file yields no document. It is read to its end, so that none is written in part."""
    characters = 0
    with opened(path) as stream:
        try:
            for number, text in enumerate(decoded(stream)):
                characters += len(text if number else text.removeprefix(BYTE_ORDER_MARK))
        except UnicodeDecodeError as error:
            return Drop(path, "not UTF-8", f"byte {error.start}: {error.reason}")
    return None if characters else Drop(path, "empty", "")
