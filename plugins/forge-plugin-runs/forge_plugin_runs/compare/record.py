"""The record of a comparison's runs, kept beside their folders: `comparison.json`, which later commands extend."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, define, field

from forge_core.contracts.errors import ForgeError
from forge_core.files import write_atomically
from forge_plugin_runs.compare.grid import Cell, Trial

FILE = "comparison.json"


@define(kw_only=True)
class Entry:
    """One run."""

    label: str
    job: str
    """The job file."""
    settings: Mapping[str, str] = field(factory=dict)
    seed: str = ""
    overrides: Sequence[str] = ()
    digest: str = ""
    """SHA-256 of the resolved job with which it finished; empty: it has not finished."""
    ended: str = ""
    """Why it has not finished: exit code, interruption, or the rung at which it was stopped; empty if it has."""
    failed: bool = False
    cpu_seconds: float = 0.0
    """Of all its processes, over all of its starts."""
    peak_memory: int = 0
    """Bytes of the largest of its processes."""
    queued: str = ""
    """SHA-256 of the resolved job with which a scheduler has it; empty: none has."""
    queued_at: float = 0.0
    """Seconds since 1970."""

    def trial(self, name: str) -> Trial:
        """The run as it was started."""
        cell = Cell(job=Path(self.job), settings=self.settings, label=self.label)
        return Trial(cell=cell, seed=self.seed, name=name, overrides=self.overrides, digest=self.digest)


class Record:
    """The entries of all runs of a folder, by the names of their run folders; each change is written at once."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self.entries: dict[str, Entry] = {}
        if self._path.is_file():
            try:
                runs: dict[str, dict[str, Any]] = json.loads(self._path.read_text())["runs"]
                self.entries = {name: Entry(**entry) for name, entry in runs.items()}
            # Not overwritten: it may be of a later version, with results of many hours
            except (ValueError, TypeError, LookupError) as error:
                raise ForgeError(f"{self._path} cannot be read ({error}); move it away to start over") from error

    def begin(self, trial: Trial) -> Entry:
        """Returns the entry of a run, made if there is none."""
        known = self.entries.get(trial.name)
        self.entries[trial.name] = entry = Entry(
            label=trial.cell.label,
            job=str(trial.cell.job),
            settings=dict(trial.cell.settings),
            seed=trial.seed,
            overrides=list(trial.overrides),
            digest=known.digest if known else "",
            ended=known.ended if known else "",
            failed=known.failed if known else False,
            cpu_seconds=known.cpu_seconds if known else 0.0,
            peak_memory=known.peak_memory if known else 0,
            queued=known.queued if known else "",
            queued_at=known.queued_at if known else 0.0,
        )
        return entry

    def write(self) -> None:
        """Write the file; a reader never sees half of it."""
        runs = {name: asdict(entry) for name, entry in self.entries.items()}
        write_atomically(self._path, json.dumps({"runs": runs}, indent=1) + "\n")
