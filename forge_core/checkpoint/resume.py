"""Where a run starts from: nothing, a checkpoint that it continues, or the weights of one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import field, frozen

from forge_core.checkpoint.manager import Checkpoints, verify
from forge_core.checkpoint.run_diff import Change, collect_provenance, compare_provenance, describe_changes, job_changes
from forge_core.checkpoint.run_folder import JOB, run_folder, storage_of
from forge_core.checkpoint.storage import MANIFEST, How
from forge_core.contracts.errors import ForgeError, ResumeError, did_you_mean
from forge_core.contracts.runtime import SpreadStorage
from forge_core.job import Job, Retention
from forge_core.plugins.catalog import Catalog

FLAG = "--resume-with-changes"
ANEW = (
    "To start a new run from these weights instead, with its own optimizer, steps and data, give it another "
    'job.name and a table [checkpoint.load] with path = "{path}"'
)


@frozen(kw_only=True)
class Start:
    """Where a run starts from, decided before anything is built.

    Either `checkpoint`, which it continues, or `weights`, which it takes from elsewhere, or neither.
    """

    checkpoint: Path | None = None
    manifest: Mapping[str, Any] = field(factory=dict)
    """The manifest of `checkpoint`."""
    weights: Mapping[str, Any] = field(factory=dict)
    """For each table of `[checkpoint.load]` what its component has found."""
    changes: Sequence[Change] = ()
    """Changes in the job since the checkpoint was saved."""
    with_changes: bool = False
    """Whether the user asked to continue in spite of unsafe changes."""

    @property
    def extras(self) -> Mapping[str, Any]:
        """The state of hooks and plugins, but for those that have given way to others under the same name."""
        changed = {change.path for change in self.changes if change.after is not None}
        saved = self.manifest["extras"].items()
        paths = {owner: owner.removeprefix("hook:").replace("plugin:", "plugins.", 1) for owner, _ in saved}
        return {owner: state for owner, state in saved if f"{paths[owner]}.type" not in changed}


def find_start(job: Job, catalog: Catalog, checkpoints: Checkpoints, resume: str, with_changes: bool) -> Start:
    """Where the run of `job` starts from, verified. Raises a `CheckpointError` if that contradicts the job."""
    located = find_checkpoint(resume, checkpoints, job.checkpoint.verify)
    if located is None:
        check_storage(run_folder(job))
        return Start(weights={table: component.find(job) for table, component in job.checkpoint.loads.items()})
    path, manifest = located
    # Distributions before the job: without one that is missing, the meaning of its keys is not known
    differing = compare_provenance(manifest["provenance"], collect_provenance(job, catalog), catalog, with_changes)
    if differing:
        checkpoints.warn("\n".join(differing))
    changes = job_changes(manifest["job"], job, catalog)
    check_changes(path, changes, with_changes)
    return Start(checkpoint=path, manifest=manifest, changes=changes, with_changes=with_changes)


def find_checkpoint(resume: str, checkpoints: Checkpoints, how: How) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that `resume` means (see `Trainer`), verified, with its manifest; None to start from nothing.

    Raises a `CheckpointError` if a path leads to none, if there is one though `never`, or if none is intact.
    """
    if resume == "never":
        if steps := checkpoints.steps():
            raise ResumeError(
                f"this run folder has checkpoints already (steps {steps}); "
                "choose another job.name, delete the folder, or continue it with --resume auto"
            )
        return None
    newest = checkpoints.newest()
    # Also with a path: the same command, started again after a crash, must not lose the steps since its first start.
    # Not with a word that is no path: it is misspelt.
    if resume == "auto" or (newest is not None and ("/" in resume or Path(resume).exists())):
        return newest
    return locate(Path(resume), how)


def locate(path: Path, how: How) -> tuple[Path, dict[str, Any]]:
    """The checkpoint at `path`, or the newest one of the run folder `path`, verified, with its manifest.

    Raises:
        CheckpointError: there is none, or it is damaged.
        JobError: the path is a file.
    """
    if (path / MANIFEST).is_file() or re.fullmatch(r"step-\d+", path.name):
        return (path := in_storage(path)), verify(path, how)
    newest = Checkpoints(storage_of(path), Retention(), how).newest()
    if newest is None:
        raise ResumeError(
            f"{path} is neither a checkpoint nor a run folder with checkpoints"
            + did_you_mean(str(path), ("auto", "never"))
        )
    return newest


def in_storage(path: Path) -> Path:
    """The folder of the checkpoint that `RUN/…/step-N` names, where the run's storage keeps it elsewhere."""
    run = next((folder for folder in [*path.parents][:2] if (folder / JOB).is_file()), None)
    with suppress(ForgeError):  # the plugin of the storage may not be installed any more
        if run is not None and (step := re.fullmatch(r"step-(\d+)", path.name)):
            storage, number = storage_of(run), int(step[1])
            # Also if the folder exists: it may be the part of a checkpoint that this machine keeps
            if (isinstance(storage, SpreadStorage) or not path.exists()) and number in storage.steps():
                return storage.path(number)
    return path


def check_storage(folder: Path) -> None:
    """Raise a `CheckpointError` if an earlier job of this run kept checkpoints elsewhere: the run would start over."""
    try:
        before = storage_of(folder)
    except ForgeError:  # the plugin of that job's storage is not installed any more
        return
    if steps := before.steps():
        place = before.path(steps[-1]).parent
        raise ResumeError(
            f"{place} has checkpoints of this run, but the job keeps them elsewhere now; "
            "set [checkpoint.storage] back, move the checkpoints, or choose another job.name"
        )


def check_changes(path: Path, changes: Sequence[Change], allowed: bool) -> None:
    """Raise a `CheckpointError` unless the job's changes since the checkpoint are safe, or possible and `allowed`."""
    meanings = {change.means for change in changes}
    listed = f"the job is not the one that saved {path}:\n{describe_changes(changes)}"
    if "impossible" in meanings:
        raise ResumeError(f"{listed}\nUndo what is impossible. {ANEW.format(path=path)}")
    if "flag" in meanings and not allowed:
        raise ResumeError(
            f"{listed}\nTo continue all the same, run the same command with {FLAG}. "
            "Or undo the changes, or take another name: --job.name"
        )
