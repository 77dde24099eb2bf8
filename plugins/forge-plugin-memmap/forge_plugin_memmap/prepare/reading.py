"""Inputs in order, in chunks that are encoded at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from attrs import asdict, field, frozen

from forge_core.contracts.errors import JobError
from forge_plugin_memmap.prepare.documents import Item

BLOCK = 1 << 20
"""Bytes read at a time, about."""
CHUNK = 1 << 20
"""Bytes of text that are encoded at a time, at least. Neither shows in the result."""


class Read(NamedTuple):
    """A part of a file."""

    at: Mapping[str, int]
    """Where it begins, in the terms of its format."""
    passed: int
    """Bytes of the file before it, as they lie on disk."""
    item: Item
    size: int
    """Bytes of text, about."""


@frozen
class InputPosition:
    """Where reading goes on."""

    input: int = 0
    """Number of the input."""
    at: Mapping[str, int] = field(factory=dict)
    passed: int = 0
    """Bytes of all inputs before it, as they lie on disk."""

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


class Chunk(NamedTuple):
    """The part of the input that a worker encodes at a time."""

    items: tuple[Item, ...]
    then: InputPosition
    """Where the next chunk begins."""


@frozen
class Input:
    """A file to read."""

    name: str
    size: int
    modified_ns: int
    read: Callable[[str, str, Mapping[str, int]], Iterator[Read]]
    """(path, field, place) -> the parts of the file from that place on."""

    @classmethod
    def of(cls, path: str, read: Callable[[str, str, Mapping[str, int]], Iterator[Read]]) -> Input:
        stat = os.stat(path)
        return cls(path, stat.st_size, stat.st_mtime_ns, read)

    def identity(self) -> dict[str, Any]:
        """Plain JSON that changes with the file."""
        return {"name": self.name, "size": self.size, "modified_ns": self.modified_ns}

    def demand_unchanged(self) -> None:
        """Raises `JobError` if the file has changed since this was made of it."""
        if not os.path.exists(self.name) or Input.of(self.name, self.read) != self:
            raise JobError(f"{self.name} changed while it was read; start again with another --output")


def read_chunks(inputs: Sequence[Input], field: str, place: InputPosition) -> Iterator[Chunk]:
    """All chunks from a place on."""
    items: list[Item] = []
    size = 0
    for here, item, item_size in _items(inputs, field, place):
        if size >= CHUNK:
            yield Chunk(tuple(items), here)
            items, size = [], 0
        items.append(item)
        size += item_size
    if items:
        yield Chunk(tuple(items), InputPosition(len(inputs), {}, sum(input_.size for input_ in inputs)))


def _items(inputs: Sequence[Input], field: str, place: InputPosition) -> Iterator[tuple[InputPosition, Item, int]]:
    before = sum(input_.size for input_ in inputs[: place.input])
    for number, input_ in enumerate(inputs[place.input :], place.input):
        at = place.at if number == place.input else {}
        for read in input_.read(input_.name, field, at):
            yield InputPosition(number, read.at, before + read.passed), read.item, read.size
        before += input_.size
