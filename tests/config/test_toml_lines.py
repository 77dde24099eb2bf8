"""Where keys stand in a TOML file, against a writer that knows because it put them there."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.config.lines import KeyPath, find_lines

KEYS = st.one_of(
    st.sampled_from(["a", "b", "lr", "type", "x-1", "2"]),
    st.text(alphabet=st.sampled_from("ab.#='\"[]{}, \\é"), max_size=4),
)
TEXTS = st.text(alphabet=st.sampled_from("a#=]}\",'[{\\\n é"), max_size=8)
SCALARS = st.one_of(st.integers(-9, 9), st.booleans(), st.floats(allow_nan=False, allow_infinity=False), TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)
DOCUMENTS = st.dictionaries(KEYS, VALUES, max_size=5)


class Writer:
    """Writes a document in styles drawn at random and notes the line of each key."""

    def __init__(self, draw: Any) -> None:
        self.text = ""
        self.lines: dict[KeyPath, int] = {}
        self._draw = draw

    def table(self, data: dict[str, Any], path: KeyPath) -> None:
        later = {}
        for key, value in data.items():
            if (isinstance(value, dict) or _are_tables(value)) and self._flip():
                later[key] = value
            elif isinstance(value, dict) and value and self._flip():
                self._dotted(value, (*path, key), [key], path)
            else:
                self._pair([key], value, path)
        for key, value in later.items():
            for index, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
                self._header((*path, key), index)
                self.table(item, (*path, key) if index is None else (*path, key, index))

    def _header(self, path: KeyPath, index: int | None) -> None:
        self._noise()
        self._mark(path if index is None else (*path, index))
        name = ".".join(f"{self._blank()}{self._key(part)}{self._blank()}" for part in path if isinstance(part, str))
        self.text += (f"[{name}]" if index is None else f"[[{name}]]") + self._end()

    def _dotted(self, data: dict[str, Any], path: KeyPath, keys: list[str], table: KeyPath) -> None:
        for key, value in data.items():
            if isinstance(value, dict) and value and self._flip():
                self._dotted(value, (*path, key), [*keys, key], table)
            else:
                self._pair([*keys, key], value, table)

    def _pair(self, keys: list[str], value: Any, table: KeyPath) -> None:
        self._noise()
        self._mark((*table, *keys))
        self.text += self._blank() + f"{self._blank()}.{self._blank()}".join(map(self._key, keys)) + self._blank() + "="
        self._value(value, (*table, *keys), inline=False)
        self.text += self._end()

    def _value(self, value: Any, path: KeyPath, inline: bool) -> None:
        self.text += self._blank()
        if isinstance(value, dict):
            self._inline_table(value, path)
        elif isinstance(value, list):
            self._array(value, path, inline)
        elif isinstance(value, str):
            self._string(value, inline)
        else:
            self.text += str(value).lower() if isinstance(value, bool) else repr(value)

    def _inline_table(self, data: dict[str, Any], path: KeyPath) -> None:
        self.text += "{"
        for number, (key, value) in enumerate(data.items()):
            self.text += ", " if number else " "
            self._mark((*path, key))
            self.text += self._key(key) + " ="
            self._value(value, (*path, key), inline=True)
        self.text += " }"

    def _array(self, items: list[Any], path: KeyPath, inline: bool) -> None:
        several_lines = not inline and self._flip()
        self.text += "["
        for index, item in enumerate(items):
            self.text += ("," if index else "") + (self._end() if several_lines else " ")
            self._mark((*path, index))
            self._value(item, (*path, index), inline)
        self.text += (",\n" if items and several_lines else "") + "]"

    def _string(self, value: str, inline: bool) -> None:
        if inline or self._flip():
            self.text += json.dumps(value, ensure_ascii=False)
        elif "'''" in value or value[-1:] == "'" or self._flip():
            self.text += '"""\n' + value.replace("\\", "\\\\").replace('"""', '""\\"') + '"""'
        else:
            self.text += "'''\n" + value + "'''"

    def _key(self, key: str) -> str:
        if key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key) and self._flip():
            return key
        return f"'{key}'" if "'" not in key and self._flip() else json.dumps(key, ensure_ascii=False)

    def _mark(self, path: KeyPath) -> None:
        for length in range(1, len(path) + 1):
            self.lines.setdefault(path[:length], self.text.count("\n") + 1)

    def _noise(self) -> None:
        self.text += self._draw(st.sampled_from(["", "", "\n", "# [no.table]\n", " \t# a = [\n\n"]))

    def _blank(self) -> str:
        return self._draw(st.sampled_from(["", " ", "\t"]))

    def _end(self) -> str:
        return self._draw(st.sampled_from(["\n", ' # ] } \' """\n', "\n\n"]))

    def _flip(self) -> bool:
        return self._draw(st.booleans())


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(item, dict) for item in value)


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS, st.data())
def test_every_key_table_and_item_is_found_on_the_line_where_it_was_written(
    data: dict[str, Any], choices: st.DataObject
) -> None:
    writer = Writer(choices.draw)
    writer.table(data, ())
    assert tomllib.loads(writer.text) == data, "the writer of this test writes TOML"
    assert find_lines(writer.text) == writer.lines


@given(st.text(alphabet=st.sampled_from("ab=.[]{}'\"#,\\\n 1"), max_size=40))
def test_text_that_is_not_toml_never_raises(text: str) -> None:
    lines = find_lines(text)
    assert all(1 <= line <= text.count("\n") + 1 for line in lines.values())


@pytest.mark.parametrize(
    ("text", "path", "line"),
    [
        ("[a]\nb = 1\n\n[a.c]\nd = 2", ("a", "c", "d"), 5),
        ("[[a]]\n[a.b]\n[[a]]\n[a.b]\nc = 1", ("a", 1, "b", "c"), 5),
        ("[[a.b]]\n[[a.b.c]]\n[[a.b.c]]\nd = 1", ("a", "b", 0, "c", 1, "d"), 4),
        ('a = """\nb = 1\n"""\nb = 2', ("b",), 4),
        ('a = """x""""\nb = 2', ("b",), 2),
        ("a = [\n  1,\n  { b = 2 }, # c\n]", ("a", 1, "b"), 3),
        ("'quoted.key' = 1\nquoted.key = 2", ("quoted", "key"), 2),
        ("a = 1979-05-27 07:32:00\nb = 1", ("b",), 2),
        ("a.b = 1\na.c = 2", ("a",), 1),
    ],
)
def test_examples(text: str, path: KeyPath, line: int) -> None:
    assert find_lines(text)[path] == line
