"""The input files, in order, and the chunks of them that are encoded at a time."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from attrs import asdict, field, frozen

from forge_core.contracts.errors import JobError, Problem
from forge_kit.data.data_files import FileFinder
from forge_plugin_memmap.paths import FoundFile, distinct, expand
from forge_plugin_memmap.prepare.documents import Fields, Item, Read
from forge_plugin_memmap.prepare.parquet_files import cut_rows, parquet_fault, read_rows
from forge_plugin_memmap.prepare.tar_files import TAR, read_tar, tar_fault
from forge_plugin_memmap.prepare.text_files import COMPRESSIONS, cut_lines, read_lines, read_text

Reader = Callable[[str, Fields, Mapping[str, int], Mapping[str, int]], Iterator[Read]]
"""(path, fields, place, end) -> the parts of a file from the place to the end; without keys, its beginning and end."""
CHUNK = 1 << 20
"""Bytes of text that are encoded at a time, at least. The result does not depend on it."""
READERS: dict[str, Reader] = {".jsonl": read_lines, ".txt": read_text, ".md": read_text, ".py": read_text}
"""Formats that may be compressed."""
CUTS: dict[str, Callable[[str, int], Mapping[str, int]]] = {".jsonl": cut_lines, ".parquet": cut_rows}
"""Suffixes of files that several parts may share: the first place in a file at or after a byte."""
PARQUET = ".parquet"
SUFFIXES = (*READERS, *(format_ + suffix for format_ in READERS for suffix in COMPRESSIONS), PARQUET, TAR)


@frozen
class InputPosition:
    """The position at which reading continues."""

    input: int = 0
    """Number of the input."""
    at: Mapping[str, int] = field(factory=dict)
    passed: int = 0
    """Bytes of all inputs before it, as they lie on disk."""

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


class InputItem(NamedTuple):
    """An item, and the number of the input that it is of."""

    input: int
    item: Item


class Chunk(NamedTuple):
    """A part of the input that a worker encodes at a time."""

    items: tuple[InputItem, ...]
    then: InputPosition
    """Where the next chunk begins."""


@frozen
class Input:
    """A file to read."""

    name: str
    size: int
    modified_ns: int
    read: Reader

    @classmethod
    def of(cls, path: str, read: Reader) -> Input:
        """Describes a file by its size and time of change, which a run compares at its end."""
        stat = os.stat(path)
        return cls(path, stat.st_size, stat.st_mtime_ns, read)

    def identity(self) -> dict[str, Any]:
        """Plain JSON that changes with the file."""
        return {"name": self.name, "size": self.size, "modified_ns": self.modified_ns}

    def demand_unchanged(self) -> None:
        """Raises `JobError` if the file has changed since this was made of it."""
        if not os.path.exists(self.name) or Input.of(self.name, self.read) != self:
            raise JobError(f"{self.name} changed while it was read; start again with another --out")


def end_of(inputs: Sequence[Input]) -> InputPosition:
    """Returns the position after all inputs."""
    return InputPosition(len(inputs), {}, sum(input_.size for input_ in inputs))


def position_of(inputs: Sequence[Input], byte: int) -> InputPosition:
    """Returns where the first document begins of those at or after a byte of all inputs, as they lie on disk.

    A file that cannot be cut is one document, or compressed: it lies where it begins, as a whole.
    """
    starts = [0, *accumulate(input_.size for input_ in inputs)]
    number = bisect_left(starts, byte)
    if starts[number] == byte:
        return InputPosition(number, {}, byte)
    name = inputs[number - 1].name
    cut = CUTS.get(os.path.splitext(name)[1])
    if cut is None:
        return InputPosition(number, {}, starts[number])
    return InputPosition(number - 1, cut(name, byte - starts[number - 1]), byte)


def read_chunks(
    inputs: Sequence[Input], fields: Fields, place: InputPosition, end: InputPosition | None = None
) -> Iterator[Chunk]:
    """Yields all chunks from a place on, to the `end`; by default, to the end of all inputs."""
    end = end_of(inputs) if end is None else end
    items: list[InputItem] = []
    size, here = 0, place
    for here, item, item_size in _items(inputs, fields, place, end):
        # Checked before an item is added, so that `here`, where this item begins, is where the next chunk starts
        if size >= CHUNK:
            yield Chunk(tuple(items), here)
            items, size = [], 0
        items.append(InputItem(here.input, item))
        size += item_size
    if items:
        # Behind the last input, so that a command that continues from there reads nothing again. Where that is cut, its
        # last item is at the cut, and has the number of the line.
        yield Chunk(tuple(items), here if "line" in end.at else end)


def _items(
    inputs: Sequence[Input], fields: Fields, place: InputPosition, end: InputPosition
) -> Iterator[tuple[InputPosition, Item, int]]:
    before = sum(input_.size for input_ in inputs[: place.input])
    # The input that the end lies in is read to there; at its beginning, not at all
    last = end.input + bool(end.at)
    for number, input_ in enumerate(inputs[place.input : last], place.input):
        at = place.at if number == place.input else {}
        for read in input_.read(input_.name, fields, at, end.at if number == end.input else {}):
            yield InputPosition(number, read.at, before + read.passed), read.item, read.size
        before += input_.size


def find_inputs(patterns: Sequence[str], field: str, output: Path) -> list[Input]:
    """Returns the files of the patterns, in the order of the patterns and, within each, of their names.

    Nothing that lies in the output folder is an input.

    Raises:
        JobError: a pattern leads to nothing, a file is of no known format, or a Parquet file has no such column.
    """
    problems: list[Problem] = []
    candidates: list[FoundFile] = []
    finder = FileFinder()
    for pattern in patterns:
        try:
            candidates += expand(pattern, SUFFIXES, finder)
        except JobError as error:
            problems += error.problems
    # In the order given, which the ids follow: `distinct` keeps it.
    files = [file for file in distinct(candidates) if not _inside(file.path, output)]
    problems += [Problem("", fault) for file in files for fault in _faults(file.path, field)]
    if problems:
        raise JobError(problems)
    return [Input.of(file.path, _reader(file.path)) for file in files]


def _faults(path: str, field: str) -> Iterator[str]:
    if not path.endswith(SUFFIXES):
        formats = f"{', '.join(READERS)}, each also with {' or '.join(COMPRESSIONS)}, {PARQUET} and {TAR}"
        yield f"{path}: the name indicates no known format; supported formats are {formats}"
    faults = [parquet_fault(path, field)] if path.endswith(PARQUET) else []
    faults += [tar_fault(path)] if path.endswith(TAR) else []
    yield from filter(None, faults)


def _reader(path: str) -> Any:
    stem, suffix = os.path.splitext(path)
    if suffix == TAR:
        return read_tar
    return READERS.get(os.path.splitext(stem)[1] if suffix in COMPRESSIONS else suffix, read_rows)


def _inside(path: str, folder: Path) -> bool:
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))
