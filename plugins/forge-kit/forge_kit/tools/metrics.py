"""Metrics of a run, read from its folder."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from attrs import define, field

from forge_core.contracts.errors import ForgeError
from forge_kit.tools.run_owner import metrics_file

if TYPE_CHECKING:
    import numpy as np

NOT_FINITE = ("nan", "inf", "-inf")
CODES = {bool: "b", int: "q", float: "d"}
"""How arrays keep the numbers of each type."""
FAULTY_RANK = "faulty_rank"
"""Metric of a step in which a hook or a plugin names a rank that computes wrong, or is slower than the others."""
BATCH = 256
"""Lines that are parsed before their numbers are added."""
# Not None, which a line may have as `null`
_ABSENT = object()


@define
class _Column:
    """The numbers of one name. Lines that follow each other without a gap need no line numbers."""

    kind: type[bool] | type[int] | type[float]
    first: int
    """The first line that has it."""
    values: array[Any]
    lines: array[int] | None = None
    """The line of each value; None: each has the next line."""

    def add(self, line: int, value: float) -> None:
        if type(value) is not self.kind and self.kind is not float:
            self.kind = float  # of mixed numbers
            self.values = array("d", self.values)
        if self.lines is None and line != self.first + len(self.values):
            self.lines = array("q", range(self.first, self.first + len(self.values)))
        if self.lines is not None:
            self.lines.append(line)
        self.values.append(value)

    def goes_on(self, line: int, kind: type) -> bool:
        """Whether a number of this type in this line follows without a gap."""
        return self.kind is kind and self.lines is None and line == self.first + len(self.values)

    def at(self, line: int) -> Any:
        """The value of a line; None if it has none."""
        place = line - self.first if self.lines is None else bisect_left(self.lines, line)
        is_there = 0 <= place < len(self.values) and (self.lines is None or self.lines[place] == line)
        return self.kind(self.values[place]) if is_there else None

    def places(self) -> np.ndarray:
        """The lines of all values."""
        import numpy as np

        count = len(self.values)
        return np.arange(self.first, self.first + count) if self.lines is None else np.frombuffer(self.lines, np.int64)


@define(eq=False)
class Metrics(Sequence[dict[str, Any]]):
    """A row of metrics for each step that was logged: `pandas.DataFrame(metrics)`.

    Numbers are kept by name, 8 bytes each, and a row is a dict that is made when it is asked for; whatever is no number
    (`counts`) is read from the file again. `column` has all numbers of one name.
    """

    _file: Path | None = None
    _columns: dict[str, _Column] = field(factory=dict)
    _others: array[int] = field(factory=lambda: array("q"))
    """Lines that have more than numbers,"""
    _offsets: array[int] = field(factory=lambda: array("q"))
    """and where each is in the file."""
    _count: int = 0
    _order: array[int] | None = None
    """The lines by step; None: they are in this order."""
    _starts: array[int] | None = None
    """Where each row begins in that order, and its end; None: each line is a row."""
    _evaluations: Metrics | None = None

    @property
    def evaluations(self) -> Metrics:
        """A row for each evaluation, with its `step`."""
        return Metrics() if self._evaluations is None else self._evaluations

    def numbers(self) -> list[str]:
        """Returns the names of all numbers but those that are true or false, in the order of their first lines."""
        return [name for name, column in self._columns.items() if column.kind is not bool]

    def last_with(self, name: str, count: int) -> list[dict[str, Any]]:
        """Returns the last rows, `count` at most, with something of this name that is no number, such as `counts`."""
        rows: list[dict[str, Any]] = []
        for place in reversed(range(len(self._others))):
            row = self._line(self._others[place])
            rows += [row] if row.get(name) else []
            if len(rows) == count:
                break
        return rows[::-1]

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps and values of the rows that have a number of this name; empty arrays if none has."""
        import numpy as np

        if name not in self._columns:
            return np.empty(0, np.int64), np.empty(0)
        column = self._columns[name]
        lines, values = column.places(), np.asarray(column.values)
        steps = np.asarray(self._columns["step"].values)[lines]
        if self._order is not None:  # of several lines of a step, the last that has it
            by_step = np.argsort(steps, kind="stable")
            is_last = np.append(np.diff(steps[by_step]) != 0, True)
            steps, values = steps[by_step][is_last], values[by_step][is_last]
        return steps, values

    def __len__(self) -> int:
        return self._count if self._starts is None else len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = index % len(self)
        if self._starts is None or self._order is None:
            return self._line(number)
        lines = self._order[self._starts[number] : self._starts[number + 1]]
        return {name: value for line in lines for name, value in self._line(line).items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Metrics | list):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def _line(self, line: int) -> dict[str, Any]:
        values = ((name, column.at(line)) for name, column in self._columns.items())
        row = {name: value for name, value in values if value is not None}
        place = bisect_left(self._others, line)
        if place < len(self._others) and self._others[place] == line and self._file is not None:
            with self._file.open("rb") as file:
                file.seek(self._offsets[place])
                whole = _parse(file.readline()) or {}
            # A run that was resumed meanwhile may have written other lines there
            row |= _others(whole) if whole.get("step") == row["step"] else {}
        return row

    def _add(self, records: Sequence[Mapping[str, Any]], offsets: Sequence[int]) -> None:
        """Append lines: a column at a time where all have a number of its type, as they mostly do."""
        first = self._count
        self._count += len(records)
        others = set[int]()
        # In the order of the lines, as `numbers` has them; a set has none
        for name in dict.fromkeys(name for record in records for name in record):
            values = [record.get(name, _ABSENT) for record in records]
            # By exact type: to `isinstance`, True is an integer
            types = set(map(type, values))
            kind = types.pop()
            if types or kind not in CODES or not all(map(_is_number, values if kind is int else ())):
                others.update(self._put(name, first, values))
            elif name not in self._columns:
                self._columns[name] = _Column(kind, first, array(CODES[kind], values))
            elif self._columns[name].goes_on(first, kind):
                self._columns[name].values.extend(values)
            else:
                self._put(name, first, values)
        # In rising order, as `_line` searches by bisection
        self._others.extend(sorted(others))
        self._offsets.extend(offsets[line - first] for line in sorted(others))

    def _put(self, name: str, first: int, values: Sequence[Any]) -> list[int]:
        """Add values one by one; returns the lines in which they are no numbers."""
        others = []
        for line, value in enumerate(values, first):
            # JSON has no such numbers, so they are written as strings
            number = float(value) if value in NOT_FINITE else value
            if _is_number(number):
                if name not in self._columns:
                    self._columns[name] = _Column(type(number), line, array(CODES[type(number)]))
                self._columns[name].add(line, number)
            elif value is not _ABSENT:
                others.append(line)
        return others

    def _sort(self) -> None:
        """Arrange the lines by step, if a step has several or they are not in this order."""
        import numpy as np

        steps = np.asarray(self._columns["step"].values) if self._count else np.empty(0)
        if (np.diff(steps) > 0).all():
            return
        # Stable: of several lines of a step, later ones stay behind earlier ones, and replace their numbers
        order = np.argsort(steps, kind="stable")
        starts = np.flatnonzero(np.diff(steps[order], prepend=steps[order[0]] - 1))
        self._order, self._starts = array("q", order.tolist()), array("q", [*starts.tolist(), len(order)])


def read_metrics(path: Path | str) -> Metrics:
    """Read the metrics of a run, finished or not, each step once.

    Memory is 8 bytes for each number, whatever else the lines have.

    Args:
        path: the run folder, of which the file is meant that its logger `jsonl` writes; or a file.

    Raises:
        ForgeError: there is no such file.
    """
    path = Path(path)
    file = metrics_file(path) if path.is_dir() else path
    if not file.is_file():
        raise ForgeError(f"{file} does not exist; give a run folder, or the file that the run writes")
    metrics, evaluations = Metrics(file), Metrics(file)
    with file.open("rb") as lines:
        located = _located(lines)
        while batch := list(islice(located, BATCH)):
            for table, is_step in ((metrics, True), (evaluations, False)):
                # Of steps and evaluations, only the lines of steps have a key `loss`
                part = [(record, offset) for record, offset in batch if ("loss" in record) == is_step]
                table._add([record for record, _ in part], [offset for _, offset in part])
    metrics._sort()
    evaluations._sort()
    metrics._evaluations = evaluations
    return metrics


def _located(lines: Iterable[bytes]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields the records of whole lines, and where they are in the file."""
    offset = 0
    for line in lines:
        if record := _parse(line):
            yield record, offset
        offset += len(line)


def _is_number(value: Any) -> bool:
    # Larger integers do not fit into an array of 64 bits, and are read from the file
    return type(value) in CODES and (type(value) is float or -(1 << 63) <= value < 1 << 63)


def _others(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a record that are not numbers."""
    return {name: value for name, value in record.items() if value not in NOT_FINITE and not _is_number(value)}


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        return json.loads(line) if line.endswith(b"\n") else None  # a run that was killed may end within a line
    except ValueError:
        return None
