"""Line numbers of the keys in a TOML file, which `tomllib` does not report.

The text is known to be valid TOML when this is called, so the scanner only needs to recognise where keys, strings,
arrays and inline tables begin and end.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from contextlib import suppress

KeyPath = tuple[str | int, ...]
"""Keys of nested tables and indices of arrays, from the root: `("data", "sources", 0, "path")`."""

_BLANK = re.compile(r"(?:[ \t]|#[^\n]*)*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = re.compile(
    r'"""(?:\\[\s\S]|[^\\])*?"""(?:"{0,2})'  # a multi-line string may end in up to two quotes of its own
    r"|'''[\s\S]*?'''(?:'{0,2})"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_OTHER_VALUE = re.compile(r"[^,\]}#\n]+")


def find_lines(text: str) -> dict[KeyPath, int]:
    """Line, counted from 1, of every table, key and array item.

    Never raises: for text that is not TOML, it returns the keys before the fault.
    """
    scanner = _Scanner(text)
    with suppress(_Lost):
        scanner.document()
    return scanner.lines


class _Lost(Exception):
    """The scanner met something that is not TOML."""


class _Scanner:
    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._text = text
        self._at = 0
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        self._tables: dict[KeyPath, int] = {}
        """Number of `[[headers]]` so far of each array of tables."""

    def document(self) -> None:
        table: KeyPath = ()
        while self._skip(_BLANK_LINES) < len(self._text):
            if self._next_is("[["):
                table = self._header("[[", "]]")
            elif self._next_is("["):
                table = self._header("[", "]")
            else:
                self._pair(table)

    # --- grammar -------------------------------------------------------------------------------------------------

    def _header(self, opening: str, closing: str) -> KeyPath:
        start = self._at
        self._expect(opening)
        *parents, last = self._key()
        self._expect(closing)
        path = (*self._resolve(parents), last)
        if opening == "[[":
            index = self._tables.get(path, 0)
            self._tables[path] = index + 1
            path = (*path, index)
        self._mark(path, start)
        return path

    def _resolve(self, keys: list[str]) -> KeyPath:
        """The table that a header's keys mean: an array of tables on the way stands for its last entry."""
        path: KeyPath = ()
        for key in keys:
            path = (*path, key)
            if path in self._tables:
                path = (*path, self._tables[path] - 1)
        return path

    def _pair(self, table: KeyPath) -> None:
        start = self._at
        path = (*table, *self._key())
        self._mark(path, start)
        self._expect("=")
        self._value(path)

    def _key(self) -> list[str]:
        parts = [self._key_part()]
        while self._next_is("."):
            self._expect(".")
            parts.append(self._key_part())
        return parts

    def _key_part(self) -> str:
        self._skip(_BLANK)
        if self._text[self._at : self._at + 1] in ('"', "'"):
            return _unquote(self._take(_STRING))
        return self._take(_BARE_KEY)

    def _value(self, path: KeyPath) -> None:
        self._skip(_BLANK)
        if self._next_is("["):
            self._array(path)
        elif self._next_is("{"):
            self._inline_table(path)
        elif self._text[self._at : self._at + 1] in ('"', "'"):
            self._take(_STRING)
        else:
            self._take(_OTHER_VALUE)

    def _array(self, path: KeyPath) -> None:
        self._expect("[")
        index = 0
        while not self._next_is("]", _BLANK_LINES):
            self._mark((*path, index), self._at)
            self._value((*path, index))
            index += 1
            if self._next_is(",", _BLANK_LINES):
                self._expect(",")
        self._expect("]")

    def _inline_table(self, path: KeyPath) -> None:
        self._expect("{")
        while not self._next_is("}", _BLANK_LINES):
            self._pair(path)
            if self._next_is(",", _BLANK_LINES):
                self._expect(",")
        self._expect("}")

    # --- text ----------------------------------------------------------------------------------------------------

    def _mark(self, path: KeyPath, at: int) -> None:
        """Note the line of `path`, and of the tables above it where this is their first mention."""
        line = bisect_right(self._newlines, at - 1) + 1
        for length in range(1, len(path) + 1):
            self.lines.setdefault(path[:length], line)

    def _skip(self, blank: re.Pattern[str]) -> int:
        match = blank.match(self._text, self._at)
        assert match is not None, "blanks may be empty"
        self._at = match.end()
        return self._at

    def _next_is(self, token: str, blank: re.Pattern[str] = _BLANK) -> bool:
        return self._text.startswith(token, self._skip(blank))

    def _expect(self, token: str) -> None:
        if not self._next_is(token):
            raise _Lost
        self._at += len(token)

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise _Lost
        self._at = match.end()
        return match.group()


def _unquote(token: str) -> str:
    try:
        return tomllib.loads(f"key = {token}")["key"]
    except tomllib.TOMLDecodeError as error:
        raise _Lost from error
