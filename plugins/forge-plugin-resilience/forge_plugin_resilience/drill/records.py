"""Files by which the ranks of a drill tell `forge-run doctor drill` what happened, and what else a run leaves."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from forge_core.contracts.run_end import End
from forge_kit.tools.metrics import FAULTY_RANK

STEPS = "steps.jsonl"
"""A `Record` a line, mostly of rank 0."""
INJECTED = "injected.json"
"""A `Record` of the rank that was hit, written before it was."""


class Event(StrEnum):
    """Kind of a record."""

    INJECTED = "injected"
    BEGIN = "begin"
    """Training begins, after so many completed steps."""
    STEP = "step"
    SAVE = "save"
    """A save begins."""
    SAVED = "saved"
    """A checkpoint is there."""
    ROLL_BACK = "roll back"
    """The run has gone back to the state of `to`."""
    WORKED = "worked"
    """The work at the end is done, with `ranks` processes left."""


@frozen(kw_only=True)
class Record:
    """One line."""

    event: Event
    step: int
    rank: int
    time: float
    to: int = 0
    ranks: int = 0

    def append(self, path: Path) -> None:
        """Append it in one call to the kernel: a kill leaves all of it or nothing."""
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, f"{json.dumps(asdict(self))}\n".encode())
        finally:
            os.close(descriptor)


def read_records(path: Path) -> Sequence[Record]:
    """The records in a file; none if there is no file yet."""
    try:
        tables = [json.loads(line) for line in path.read_text().splitlines()]
    except FileNotFoundError:
        return []
    return [Record(**{**table, "event": Event(table["event"])}) for table in tables]


@frozen(kw_only=True)
class Finding:
    """What shows that a run has found its fault."""

    text: str
    """For people."""
    time: float = 0.0
    """When it was found; 0 where that is the end of the run."""


@frozen(kw_only=True)
class Evidence:
    """What a run that was hit has left behind."""

    injected: Record
    end: End | None
    """None if it is not known: it was killed as a whole, or wrote none."""
    records: Sequence[Record]
    rows: Sequence[Mapping[str, Any]]
    """Its metrics, a row for each step."""
    ranks: int
    """Ranks that it was started with."""

    def ended(self, *causes: str, rank: int | None = None) -> Finding | None:
        """The end of the run, if it has one of these causes, and names `rank` where one is given."""
        end = self.end
        if end is None or end.cause not in causes or rank not in (None, end.rank):
            return None
        return Finding(text=end.reason)

    def last(self, event: Event) -> Record | None:
        """The last record of a kind."""
        return next((record for record in reversed(self.records) if record.event == event), None)

    def named(self, rank: int) -> Finding | None:
        """The first step in which a hook names a rank as the faulty one."""
        row = next((row for row in self.rows if row.get(FAULTY_RANK) == rank), None)
        if row is None:
            return None
        return Finding(text=f"step {row['step']} names rank {rank} as faulty", time=row["time"])
