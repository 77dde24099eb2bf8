"""Whether a node should start a run again: python3 -m forge_plugin_launch.remote.starts FOLDER --attempt ID.

For clusters that start a failed command again without regard to its exit code. The first node calls it before the run:
exit code 0 lets the run start, `GIVE_UP` does not, as another start would change nothing. All it needs is in the run
folder: neither a connection, nor torch, nor the job.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from attrs import asdict, frozen

from forge_core.checkpoint.run_folder import RunFolder
from forge_core.checkpoint.storage import Local
from forge_core.contracts.errors import ExitCode
from forge_core.contracts.run_end import End
from forge_core.files import write_atomically
from forge_plugin_launch.clusters import CONTINUED, FINAL

GIVE_UP = 3
"""Exit code: do not start the run."""
RECORD = "starts.json"


@frozen(kw_only=True)
class Starts:
    """What `starts.json` in a run folder has of one submission."""

    attempt: str
    """The submission, by the name that the cluster gives it."""
    checkpoint: int = 0
    """The newest checkpoint at the last start."""
    idle: int = 0
    """Starts in a row that began with this checkpoint, without the first one."""


def decide(folder: Path, attempt: str, max_idle: int) -> str:
    """Returns why a run should not be started again, and notes this start; empty: it should be.

    Args:
        folder: run folder.
        attempt: name of the submission. What another one left does not count.
        max_idle: starts in a row without a new checkpoint that are allowed, after runs that did not save.
    """
    end = _end(folder, attempt)
    if end is not None and end.code in FINAL:
        # A run that has finished ends at once on all nodes, also if another one failed after it: that is no failure
        is_finished = end.code == ExitCode.FINISHED
        return "" if is_finished else f"it has ended for good: exit code {end.code}, {end.reason or end.cause}"
    newest, earlier = _newest_checkpoint(folder), _read(folder)
    is_idle = earlier.attempt == attempt and earlier.checkpoint == newest and not (end and end.code in CONTINUED)
    starts = Starts(attempt=attempt, checkpoint=newest, idle=earlier.idle + 1 if is_idle else 0)
    if starts.idle > max_idle:
        reason = f"; the last end: {end.reason or end.cause}" if end else ""
        return f"{starts.idle} starts in a row made no checkpoint after step {newest}{reason}"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RECORD, json.dumps(asdict(starts)) + "\n")
    return ""


def _end(folder: Path, attempt: str) -> End | None:
    # A start that was killed with its node has left none
    end = RunFolder(folder).end()
    return end if end is not None and end.attempt == attempt else None


def _read(folder: Path) -> Starts:
    try:
        return Starts(**json.loads((folder / RECORD).read_text()))
    except (OSError, ValueError, TypeError):
        return Starts(attempt="")


def _newest_checkpoint(folder: Path) -> int:
    names = [path.name.removeprefix("step-") for path in (folder / Local().folder).glob("step-*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def main() -> int:
    """The program; returns its exit code."""
    parser = argparse.ArgumentParser("forge_plugin_launch.remote.starts", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--attempt", required=True)
    parser.add_argument("--max-idle", type=int, default=3)
    parsed = parser.parse_args()
    if reason := decide(parsed.folder, parsed.attempt, parsed.max_idle):
        print(f"{parsed.folder} is not started again: {reason}", file=sys.stderr)
        return GIVE_UP
    return 0


if __name__ == "__main__":
    sys.exit(main())
