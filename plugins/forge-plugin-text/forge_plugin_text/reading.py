"""Reads documents from files: decompression, decoding and the fields of JSON lines."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Literal, NamedTuple

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_kit.data.tar_groups import text_groups
from forge_plugin_text.listing import TAR, TextFile

BYTE_ORDER_MARK = "\ufeff"


class Document(NamedTuple):
    """One text. `name` is the file's name, and in JSON lines also the number of the line: `data/a.jsonl:17`."""

    name: str
    file: str
    text: str


@frozen
class Reading:
    """Settings of reading text from bytes."""

    errors: Literal["strict", "replace"] = "strict"
    """Handling of bytes that are not UTF-8: an error, or replacement by U+FFFD."""
    field: str = "text"
    """The key of a JSON line that holds its text."""

    def documents(self, file: TextFile) -> Iterator[Document]:
        """Yields the documents of one file, in its order, without a byte-order mark at its start.

        Raises:
            JobError: the file cannot be read, is damaged, not UTF-8, or a line has another content.
        """
        if file.format == TAR:
            yield from self._groups(file)
            return
        with _opened(file) as stream:
            if file.format == ".jsonl":
                yield from self._lines(file, stream)
            else:
                text = self._decode(stream.read(), file.path, 0)
                yield Document(file.name, file.name, text.removeprefix(BYTE_ORDER_MARK))

    def _groups(self, file: TextFile) -> Iterator[Document]:
        """Yields the text of each group of an archive, or of its JSON, where it has no text file."""
        for number, (_, group) in enumerate(text_groups(file.path), 1):
            where = f"{file.path}:{number} ({group.name})"
            content = group.text if group.text is not None else group.table
            if content is None:
                raise JobError(f"{where}: has neither .txt nor .json; leave such files out of the archive")
            text = self._decode(content, where, 0).removeprefix(BYTE_ORDER_MARK)
            yield Document(
                f"{file.name}:{number}", file.name, text if group.text is not None else self._content(text, where)
            )

    def _lines(self, file: TextFile, stream: BinaryIO) -> Iterator[Document]:
        offset = 0
        for number, line in enumerate(stream, start=1):
            where = f"{file.path}:{number}"
            text = self._decode(line, where, offset)
            offset += len(line)
            if text.strip():
                # Before every line, as files with such marks may have been concatenated
                content = self._content(text.removeprefix(BYTE_ORDER_MARK), where)
                yield Document(f"{file.name}:{number}", file.name, content)

    def _decode(self, data: bytes, where: str, offset: int) -> str:
        try:
            return data.decode("utf-8", self.errors)
        except UnicodeDecodeError as error:
            at = offset + error.start
            raise JobError(
                f"{where}: byte {at} (0x{data[error.start]:02x}) is not UTF-8 ({error.reason}); "
                'convert the file, or set errors = "replace" to read U+FFFD in its place'
            ) from error

    def _content(self, line: str, where: str) -> str:
        try:
            record = json.loads(line)
        # RecursionError: a line of thousands of brackets
        except (ValueError, RecursionError) as error:
            raise JobError(f"{where}: not JSON ({error}): {_excerpt(line)}; every line must be one object") from error
        if not isinstance(record, dict):
            raise JobError(f"{where}: {_excerpt(line)} is not an object; every line must be one")
        if self.field not in record:
            keys = ", ".join(map(repr, record)) or "nothing"
            raise JobError(f"{where}: no key {self.field!r}, but {keys}; set `field` to the key that holds the text")
        text = record[self.field]
        if not isinstance(text, str):
            raise JobError(f"{where}: {self.field!r} holds {_excerpt(json.dumps(text))}, which is not a string")
        return self._encodable(text, where)

    def _encodable(self, text: str, where: str) -> str:
        """Handle half a surrogate pair, which JSON can escape and UTF-8 cannot encode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            if self.errors == "replace":
                # Through UTF-16, which has surrogates: `encode(errors="replace")` would write `?` and not U+FFFD
                return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            raise JobError(
                f"{where}: character {error.start} of {self.field!r} is half a surrogate pair, which UTF-8 cannot "
                'hold; correct the line, or set errors = "replace" to read U+FFFD in its place'
            ) from error
        return text


@contextmanager
def _opened(file: TextFile) -> Iterator[BinaryIO]:
    """Opens a file for its decompressed bytes; errors in reading them become a `JobError` that names the file."""
    try:
        with _open(file) as stream:
            yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise JobError(f"{file.path}: damaged {file.compression} data ({error}); make the file again") from error
    except OSError as error:
        raise JobError(f"{file.path}: cannot be read ({error.strerror or error})") from error


def _open(file: TextFile) -> BinaryIO:
    if file.compression == ".gz":
        return gzip.open(file.path, "rb")  # type: ignore[return-value]
    if file.compression == ".zst":
        from forge_plugin_text.zstd import open_zstd

        return open_zstd(file.path)
    return open(file.path, "rb")


def _excerpt(text: str, length: int = 60) -> str:
    text = text.strip()
    return repr(text if len(text) <= length else text[:length] + "…")
