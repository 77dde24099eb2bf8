"""Traces on disk, by what the user names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_core.checkpoint.run_folder import JOB, refuse_file
from forge_core.contracts.errors import JobError, listed
from forge_plugin_profile.breakdown import breakdown
from forge_plugin_profile.trace import read_trace

TRACE = re.compile(r"rank-(\d+)\.pt\.trace\.json(\.gz)?$")
STEP_FOLDER = re.compile(r"step-(\d+)$")


def find_traces(path: Path, step: int | None = None, rank: int | None = None) -> list[Path]:
    """Returns the traces of a run folder's profile, of the folder of a window, or the file itself; in order of ranks.

    Raises:
        JobError: there are none; the message lists the available ones, if any.
    """
    if path.is_file():
        if not path.name.endswith((".json", ".json.gz")):
            refuse_file(path)
        return [path]
    folder = _window(path, step)
    traces = {int(match[1]): file for file in folder.iterdir() if (match := TRACE.match(file.name))}
    if not traces:
        raise JobError(f"{folder} has no trace (rank-R.pt.trace.json.gz): the run may have ended within the window")
    if rank is not None and rank not in traces:
        raise JobError(f"--rank {rank}: {folder} has traces of rank {listed(sorted(traces))}")
    return [traces[rank]] if rank is not None else [traces[number] for number in sorted(traces)]


def _window(path: Path, step: int | None) -> Path:
    if not path.is_dir():
        raise JobError(f"{path} does not exist; name a run folder, a folder profile/step-N, or a trace")
    if STEP_FOLDER.match(path.name):
        return path
    # The user may also name the folder `profile` itself
    inside = path / "profile" if (path / "profile").is_dir() else path
    windows = {int(match[1]): each for each in inside.iterdir() if (match := STEP_FOLDER.match(each.name))}
    if not windows:
        raise JobError(f"{path} has no profile: add [hooks.profile] to the job, with a `start` that is still to come")
    if step is not None and step not in windows:
        raise JobError(f"--step {step}: {path} has profiles that begin with step {listed(sorted(windows))}")
    return windows[max(windows) if step is None else step]


def breakdowns(traces: Sequence[Path]) -> list[dict[str, Any]]:
    """Returns the breakdown of each trace."""
    return [breakdown(read_trace(trace)) for trace in traces]


def run_folder(trace: Path) -> Path | None:
    """Returns the run folder that a trace is in; None for one that was moved."""
    # RUN/profile/step-N/TRACE
    folder = trace.resolve().parent.parent.parent
    return folder if (folder / JOB).is_file() else None
