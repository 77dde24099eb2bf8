"""Line numbers of the keys in a TOML file, which `tomllib` does not report.

`tomllib` has accepted the text before, so the scanner needs to recognise only where keys, strings, arrays and inline
tables begin and end, and not what they mean.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from contextlib import suppress
from typing import Any

KeyPath = tuple[str | int, ...]
"""Keys of nested tables and indices of arrays, from the root: `("data", "sources", 0, "path")`."""

_STRING = (
    r'"""(?:\\[\s\S]|[^\\])*?"""(?:"{0,2})'  # a multi-line string may end in up to two quotes of its own
    r"|'''[\s\S]*?'''(?:'{0,2})"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
)
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY = re.compile(rf"(?:{_STRING}|[A-Za-z0-9_. \t-])+")
_SCALAR = re.compile(rf"{_STRING}|[^,\]}}#\n]+")


def find_lines(text: str) -> dict[KeyPath, int]:
    """Line, counted from 1, of every table, key and array item.

    Never raises: for text that is not TOML, it returns the lines of everything like a key before the fault.
    """
    scanner = _Scanner(text)
    with suppress(ValueError):
        scanner.document()
    return scanner.lines


def split_key(text: str) -> list[str]:
    """The parts of a dotted key; raises `tomllib.TOMLDecodeError` where it is not a key of TOML."""
    table: Any = tomllib.loads(f"{text} = 0")  # quotes and escapes are tomllib's to resolve
    parts = []
    while isinstance(table, dict):
        [(part, table)] = table.items()
        parts.append(part)
    return parts


class _Scanner:
    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._text = text
        self._at = 0
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        self._last_entry: dict[KeyPath, int] = {}  # index of the newest `[[header]]` of each array of tables

    def document(self) -> None:
        table: KeyPath = ()
        while self._skip_blank() < len(self._text):
            start = self._at
            if self._accept("[["):
                table = self._header("]]", start)
            elif self._accept("["):
                table = self._header("]", start)
            else:
                self._pair(table)

    def _header(self, closing: str, start: int) -> KeyPath:
        path: KeyPath = ()
        *parents, last = self._key()
        for key in parents:  # an array of tables on the way stands for its newest entry
            path = (*path, key)
            path = (*path, self._last_entry[path]) if path in self._last_entry else path
        self._expect(closing)
        path = (*path, last)
        if closing == "]]":
            self._last_entry[path] = self._last_entry.get(path, -1) + 1
            path = (*path, self._last_entry[path])
        self._mark(path, start)
        return path

    def _pair(self, table: KeyPath) -> None:
        start = self._at
        path = (*table, *self._key())
        self._mark(path, start)
        self._expect("=")
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        if self._accept("["):
            index = 0
            while not self._accept("]"):
                self._mark((*path, index), self._at)
                self._value((*path, index))
                self._accept(",")
                index += 1
        elif self._accept("{"):
            while not self._accept("}"):
                self._pair(path)
                self._accept(",")
        else:
            self._take(_SCALAR)

    def _mark(self, path: KeyPath, at: int) -> None:
        """Note the line of `path`, and of the tables above it where this is their first mention."""
        line = bisect_right(self._newlines, at - 1) + 1
        for length in range(1, len(path) + 1):
            self.lines.setdefault(path[:length], line)

    def _key(self) -> list[str]:
        key = self._take(_KEY)
        if '"' in key or "'" in key:
            return split_key(key)
        return [part.strip() for part in key.split(".")]  # tomllib for every key would triple the time

    def _skip_blank(self) -> int:
        match = _BLANK.match(self._text, self._at)
        assert match is not None, "blanks may be empty"
        self._at = match.end()
        return self._at

    def _accept(self, token: str) -> bool:
        """Skip blanks, and the token where it comes next."""
        is_next = self._text.startswith(token, self._skip_blank())
        self._at += len(token) if is_next else 0
        return is_next

    def _expect(self, token: str) -> None:
        if not self._accept(token):
            raise ValueError(f"expected {token}")

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise ValueError(f"expected {pattern.pattern}")
        self._at = match.end()
        return match.group()
