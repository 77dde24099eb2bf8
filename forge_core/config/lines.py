"""Line numbers of the keys in a TOML file, which `tomllib` does not report.

`tomllib` has accepted the text before, so the scanner needs to recognise only where keys, strings, arrays and inline
tables begin and end, and not what they mean.
"""

from __future__ import annotations

import re
import tomllib
from contextlib import suppress
from typing import Any

KeyPath = tuple[str | int, ...]
"""Keys of nested tables and indices of arrays, from the root: `("data", "sources", 0, "path")`."""

_STRING = (
    r'"""(?:\\[\s\S]|[^\\])*?"""(?:"{0,2})'  # the text of a multi-line string may end in up to two quotes
    r"|'''[\s\S]*?'''(?:'{0,2})"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
)
_BLANK = r"(?>[ \t\r\n]|#[^\n]*)*+"  # possessive: blanks without the expected text after them are not read twice
_KEY = rf"(?:{_STRING}|[A-Za-z0-9_. \t-])+"
_SCALAR = rf"{_STRING}|[^,\]}}#\n\0]+"
_END = "\0"  # which no TOML has


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
        self._text = text + _END
        self._start, self._at = 0, 0  # where the newest token starts, and where it ends
        self._line = 1  # of its start
        self._last_entry: dict[KeyPath, int] = {}  # index of the newest `[[header]]` of each array of tables

    def document(self) -> None:
        table: KeyPath = ()
        while not self._accept(_END):
            if opening := self._accept(r"\[\[?"):
                table = self._header(opening)
            else:
                self._pair(table)

    def _header(self, opening: str) -> KeyPath:
        path: KeyPath = ()
        *parents, last = self._key()
        for key in parents:  # an array of tables on the way stands for its newest entry
            path = (*path, key)
            path = (*path, self._last_entry[path]) if path in self._last_entry else path
        self._take(r"\]\]?")
        path = (*path, last)
        if opening == "[[":
            self._last_entry[path] = self._last_entry.get(path, -1) + 1
            path = (*path, self._last_entry[path])
        self._mark(path)
        return path

    def _pair(self, table: KeyPath) -> None:
        path = (*table, *self._key())
        self._mark(path)
        self._take("=")
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        opening = self._take(rf"[\[{{]|{_SCALAR}")
        self._mark(path)
        if opening == "[":
            index = 0
            while not self._accept(r"\]"):
                self._value((*path, index))
                self._accept(",")
                index += 1
        elif opening == "{":
            while not self._accept("}"):
                self._pair(path)
                self._accept(",")

    def _mark(self, path: KeyPath) -> None:
        """Note the line of `path`, and of the tables above it where this is their first mention."""
        for length in range(1, len(path) + 1):
            self.lines.setdefault(path[:length], self._line)

    def _key(self) -> list[str]:
        key = self._take(_KEY)
        if '"' in key or "'" in key:
            return split_key(key)
        return [part.strip() for part in key.split(".")]  # tomllib for every key would triple the time

    def _accept(self, pattern: str) -> str:
        """Skip blanks, and what comes next if it fits; returns that, or nothing."""
        match = re.compile(f"{_BLANK}({pattern})").match(self._text, self._at)
        if match is None:
            return ""
        self._line += self._text.count("\n", self._start, match.start(1))
        self._start, self._at = match.span(1)
        return match[1]

    def _take(self, pattern: str) -> str:
        if not (token := self._accept(pattern)):
            raise ValueError(f"expected {pattern}")
        return token
