"""Loggers that report to a service for experiments: the run's identity there, and the parts of a line to send."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen
from attrs.validators import gt, min_len

from forge_core.checkpoint.run_folder import RunFolder
from forge_core.contracts.components import LoggerComponent
from forge_core.files import write_atomically

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext

RECORD = "trackers.json"
"""Name of the file in a run folder that records which run of which service it is."""


@frozen(kw_only=True)
class TrackerComponent(LoggerComponent):
    """Base of loggers that report to a service for experiments."""

    project: str = field(default="forge", validator=min_len(1))
    """Project, or experiment, of the service; it is made if it does not exist."""
    name: str = ""
    """Name that the service shows for the run; empty: `job.name`."""
    tags: tuple[str, ...] = ()
    """Tags of the run, in the service."""
    interval: int = field(default=1, validator=gt(0))
    """Steps between two training lines that are sent; evaluations are always sent."""
    branch: str = ""
    """Any word. A copied run folder with a different word than the original is a separate run in the service."""


@define
class TrackedRun:
    """A run in a service. Its id is stored in the run folder, so that a continued run remains the same run there."""

    id: str
    name: str
    project: str
    folder: Path
    starts: list[int]
    """Steps after which the run was started, this time's last. Lines of a step may come once from each start."""
    is_new: bool
    """Whether the service has never heard of `id`."""
    counted: int
    """Step whose counts were sent last; at first, the step of the start."""
    cut_off: int | None = None
    """The step after which earlier starts ended without `ended`, killed say; None: the last one did not."""
    _key: str = ""

    @property
    def attempt(self) -> int:
        """Number of this start, from 1: distinguishes lines of a step that was made again after a crash."""
        return len(self.starts)

    @classmethod
    def begin(cls, component: TrackerComponent, service: str, context: BuildContext, step: int) -> TrackedRun:
        """Find the run of `service` that this folder was, or make an id, and note the start.

        A run that starts from nothing (`step` 0) is a new one, as the figures of the one before are stale.
        """
        folder = context.folder
        assert folder is not None
        key = f"{service}/{component.project}/{component.branch}"
        runs = _recorded(folder)
        earlier = runs.get(key) if step else None
        entry = earlier or {"id": secrets.token_hex(6), "starts": [], "ended": 0}
        starts = entry["starts"] = [*entry["starts"], step]
        # Records of earlier versions lack it: their starts count as ended
        ended = entry.setdefault("ended", len(starts) - 1)
        # Before anything is sent, so that a start that is killed soon is known too
        _record(folder, {**runs, key: entry})
        cut_off = starts[ended] if ended < len(starts) - 1 else None
        name = component.name or context.job.job.name
        return cls(entry["id"], name, component.project, folder, starts, earlier is None, step, cut_off, key)

    def ended(self) -> None:
        """Note that the service has all lines of this start and of those before, or keeps them."""
        runs = _recorded(self.folder)
        _record(self.folder, {**runs, self._key: {**runs[self._key], "ended": len(self.starts)}})

    def takes_counts(self, record: Mapping[str, Any], interval: int) -> bool:
        """Whether a line's counts are sent: it is the first line with counts in every `interval` steps (0: never)."""
        # Not every step that `interval` divides: lines have counts every `metrics.counts_interval` steps only.
        step = record["step"]
        if not interval or not record.get("counts") or step // interval == self.counted // interval:
            return False
        self.counted = step
        return True

    def config(self) -> dict[str, Any]:
        """The resolved job, which the run writes into its folder before its loggers start."""
        return dict(RunFolder(self.folder).job())


def _recorded(folder: Path) -> dict[str, dict[str, Any]]:
    """The runs of services that a folder was, by service, project and branch."""
    path = folder / RECORD
    runs: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return runs


def _record(folder: Path, runs: Mapping[str, Any]) -> None:
    write_atomically(folder / RECORD, json.dumps(runs, indent=1) + "\n")


def is_sent(record: Mapping[str, Any], interval: int) -> bool:
    """Whether a line is sent: every evaluation, and training lines of every `interval` steps."""
    return "loss" not in record or record["step"] % interval == 0


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a line, by names in groups: `train/loss`, `eval/loss`. Without step, time and counts."""
    return {
        name if "/" in name else f"train/{name}": float(value)
        for name, value in record.items()
        # True and false (`skipped`) are sent as 1 and 0
        if name not in ("step", "time") and isinstance(value, Real)
    }


def count_rows(record: Mapping[str, Any]) -> dict[str, Sequence[float]]:
    """What modules counted in a line, by name and layer: `{"moe/load/3": (tokens of each expert)}`."""
    counts = record.get("counts", {})
    return {f"{name}/{layer}": values for name, rows in counts.items() for layer, values in rows.items()}
