"""Faults that were found, and the record of checked steps in the run folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from attrs import asdict, define, field, frozen

from forge_core import ForgeError
from forge_core.files import write_atomically

RECORD = "sdc.jsonl"
"""Name of the file in the run folder: a line for each checked step."""


class CorruptionError(ForgeError):
    """A fault that could not be repaired: the state with which the run would continue may be wrong."""

    exit_code = 77  # type: ignore[assignment]  # a code of this plugin's own


@frozen
class Fault:
    """A computation of a rank that was wrong, or a copy that differs."""

    step: int
    rank: int
    host: str
    what: str
    """The error, in words."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.what}"


@define
class CheckedStep:
    """The training step under way, shared by the hook that sets its number and the executor that computes it."""

    step: int = 0
    """Its number, from 1; 0 outside the run's own steps, as in a dry run."""
    due: bool = False
    """Whether it is checked."""
    digests: list[str] = field(factory=list)
    """Digest of each rank's gradients, before ranks share them; empty until the step is computed."""
    faults: list[Fault] = field(factory=list)
    """All that this process has found in the run."""

    def found(self, faults: Iterable[Fault]) -> list[Fault]:
        """Keep new faults and return them."""
        new = list(faults)
        self.faults += new
        return new

    @property
    def faults_of_step(self) -> list[Fault]:
        """Faults of the step under way."""
        return [fault for fault in self.faults if fault.step == self.step]


def named(faults: Sequence[Fault]) -> str:
    """The faults for a message, one a line."""
    return "\n".join(f"  {fault}" for fault in faults)


class Record:
    """`sdc.jsonl`: digests and faults of the checked steps."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RECORD

    def start(self, step: int) -> None:
        """Drop lines after `step`, which a run that continues computes again."""
        lines = [json.dumps(line) + "\n" for line in self.lines() if line["step"] <= step]
        write_atomically(self._path, "".join(lines))  # a process that is killed here loses no line

    def add(self, checked: CheckedStep) -> None:
        """Append the line of a checked step."""
        faults = [asdict(fault) for fault in checked.faults_of_step]
        with self._path.open("a") as file:
            file.write(json.dumps({"step": checked.step, "gradients": checked.digests, "faults": faults}) + "\n")

    def lines(self) -> Iterator[dict]:
        """The lines that are whole."""
        text = self._path.read_text() if self._path.is_file() else ""
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):  # a run that was killed may end within a line
                yield json.loads(line)

    def gradients(self, step: int) -> list[str]:
        """Digest of each rank's gradients at a step; empty where it was not checked."""
        return next((line["gradients"] for line in self.lines() if line["step"] == step), [])
