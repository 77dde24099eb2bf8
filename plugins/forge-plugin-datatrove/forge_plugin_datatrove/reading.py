"""The documents of `data prepare`'s inputs as datatrove has them, each with an id and the place where it was read."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from forge_core.contracts.errors import Problem
from forge_plugin_datatrove.accounting import ORIGIN, Removals
from forge_plugin_memmap.prepare.documents import Drop, Fields, Place, Reason
from forge_plugin_memmap.prepare.inputs import PARQUET, Input
from forge_plugin_memmap.prepare.parquet_files import open_parquet, row_groups
from forge_plugin_memmap.prepare.part_range import Part
from forge_plugin_memmap.prepare.text_files import Lines, parse_line

ROWS = 1000
"""Rows of a Parquet file that are read at a time."""


class DocumentReader(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Reads the files that `forge-run data prepare` reads: JSON lines, Parquet and text.

    datatrove's own readers divide work by whole files, and leave out lines that are no JSON with a warning in a log.
    This one gives each rank an equal share of bytes, as `data prepare --part`, and records what it could not read.

    Args:
        inputs: the files, as `find_inputs` returns them.
        text_key: the key of a line, or the column, with the text.
        id_key: the key or column with the id. Where it is missing, the id is the document's place: `a.jsonl:1024`.
        removals: takes what cannot be read.
    """

    type = "reader"
    name = "documents"

    def __init__(self, inputs: Sequence[Input], text_key: str, id_key: str, removals: Removals) -> None:
        super().__init__()
        self.inputs = inputs
        self.text_key = text_key
        self.id_key = id_key
        self.removals = removals

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yields the documents of this rank's part."""
        del data  # it is the first step
        # Each rank finds its bounds alone, without reading what lies before them
        begin, end = Part(rank + 1, world_size).bounds(self.inputs)
        # The input that the end lies in is read to there; at its beginning, not at all
        last = end.input + bool(end.at)
        with self.removals.opened(rank) as removals:
            for number in range(begin.input, last):
                start = begin.at if number == begin.input else {}
                stop = end.at if number == end.input else {}
                for found in self._read(self.inputs[number], start, stop):
                    if isinstance(found, Document):
                        self.stat_update("documents")
                        self.stat_update("characters", value=len(found.text))
                        yield found
                        continue
                    drop, origin = found
                    self.stat_update(f"reason: {drop.reason}")
                    removals.add(str(drop.where), origin, drop.reason, detail=drop.detail)

    def _read(
        self, input_: Input, start: Mapping[str, int], stop: Mapping[str, int]
    ) -> Iterator[Document | tuple[Drop, Mapping[str, Any]]]:
        if input_.name.endswith(PARQUET):
            yield from self._rows(input_.name, start.get("row", 0), stop.get("row"))
            return
        pieces: list[str] = []
        for read in input_.read(input_.name, Fields(self.text_key), start, stop):
            if isinstance(read.item, Lines):
                yield from self._lines(read.item, read.at.get("byte", 0))
                continue
            # A text file is one document, of which long ones come in pieces
            origin = {"file": input_.name}
            for piece in read.item.documents():
                if isinstance(piece, Drop):
                    yield piece, origin
                    continue
                pieces.append(piece.text)
                if piece.is_last:
                    yield Document("".join(pieces), input_.name, metadata={ORIGIN: origin})

    def _lines(self, lines: Lines, byte: int) -> Iterator[Document | tuple[Drop, Mapping[str, Any]]]:
        for number, line in enumerate(io.BytesIO(lines.data)):
            # The byte and not the number of the line, which a part that begins within the file does not know
            origin = {"file": lines.name, "byte": byte}
            where = f"{lines.name}:{byte}"
            byte += len(line)
            yield self._line(line, where, origin, is_first=origin["byte"] == 0 and number == 0)

    def _line(
        self, line: bytes, where: str, origin: Mapping[str, Any], is_first: bool
    ) -> Document | tuple[Drop, Mapping[str, Any]]:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            record = None
        if isinstance(record, dict) and isinstance(record.get(self.text_key), str) and record[self.text_key]:
            return self._document(record, where, origin)
        # `data prepare` decides: it names the reason, and takes a few lines that orjson refuses (a byte-order mark)
        parsed = parse_line(line, Place(where), Fields(self.text_key), is_first)
        if isinstance(parsed, Drop):
            return parsed, origin
        return Document(parsed.text, where, metadata={ORIGIN: origin})

    def _document(self, record: dict[str, Any], where: str, origin: Mapping[str, Any]) -> Document:
        text = record.pop(self.text_key)
        id_ = record.pop(self.id_key, None)
        # What an earlier command has read elsewhere keeps its first origin
        record.setdefault(ORIGIN, origin)
        return Document(text, where if id_ is None or id_ == "" else str(id_), metadata=record)

    def _rows(self, name: str, start: int, stop: int | None) -> Iterator[Document | tuple[Drop, Mapping[str, Any]]]:
        with open_parquet(name) as file:
            for group, before in row_groups(file, start, stop):
                row = before
                # Parts begin with row groups, so that no row of a group that is read lies before the start
                for batch in file.iter_batches(ROWS, row_groups=[group]):
                    for index in range(len(batch)):
                        row += 1
                        yield self._row(batch.slice(index, 1), name, row)

    def _row(self, batch: Any, name: str, row: int) -> Document | tuple[Drop, Mapping[str, Any]]:
        where, origin = f"{name}:{row}", {"file": name, "row": row}
        try:
            [record] = batch.to_pylist()
        except UnicodeDecodeError as error:
            return Drop(Place(where), "not UTF-8", f"byte {error.start}: {error.reason}"), origin
        # Row by row, so that one that is not UTF-8 is left out alone
        text = record.get(self.text_key)
        if not text:
            reason: Reason = "empty" if text == "" else "not a string"
            return Drop(Place(where), reason, ""), origin
        return self._document({key: value for key, value in record.items() if value is not None}, where, origin)


def column_problems(inputs: Sequence[Input]) -> list[Problem]:
    """Returns a problem for each Parquet file with a column that JSON lines cannot hold."""
    import pyarrow

    problems = []
    for input_ in inputs:
        if input_.name.endswith(PARQUET):
            with open_parquet(input_.name) as file:
                schema = file.schema_arrow
            binary = [field.name for field in schema if pyarrow.types.is_binary(field.type)]
            if binary:
                message = f"{input_.name}: column {', '.join(binary)} holds bytes, which JSON lines cannot have"
                problems.append(Problem("inputs", f"{message}; leave it out of the file"))
    return problems
