"""The public face of the engine: a job in, on all ranks the same, and a trained model in its run folder out."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

from forge_core.checkpoint.manager import Checkpoints
from forge_core.checkpoint.resume import find_start
from forge_core.checkpoint.run_diff import collect_provenance, text_changes
from forge_core.checkpoint.run_folder import LEASE_S, RunFolder, owned, run_folder
from forge_core.config.load import complete, dump_job, load_job
from forge_core.config.rules import check_rules
from forge_core.config.tree import Source
from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import SHOWN, ExitCode, JobError
from forge_core.contracts.phase import Phase
from forge_core.contracts.run_end import End
from forge_core.engine.build import build_context, build_run
from forge_core.engine.loop import Loop
from forge_core.job import Job
from forge_core.launch.progress_beacon import ProgressBeacon
from forge_core.launch.rank_process import this_process
from forge_core.launch.rendezvous import Rendezvous
from forge_core.launch.watchdog import Watchdog
from forge_core.parallel.mesh import global_rank, join_ranks, world_size
from forge_core.plugins.catalog import Catalog


@frozen(kw_only=True)
class Summary:
    """Result of a run."""

    step: int
    """Completed steps."""
    loss: float | None
    """Training loss of the last step, in nats a token; None if no step was run."""
    evaluation: Mapping[str, float]
    """Metrics of the last evaluation."""
    folder: Path
    end: End
    """How the run ended, as `end.json` has it."""

    def metrics(self) -> Any:
        """The rows of all steps of the run, those before a resume included: a `forge_kit.tools.metrics.Metrics`."""
        from forge_core import read_metrics  # late: of forge-kit, which need not be installed to train

        return read_metrics(self.folder)

    @property
    def stopped(self) -> str:
        """Why the run ended before its last step; empty if it did not."""
        return self.end.reason

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode(self.end.code)


class Trainer:
    """Trains a model as described by a job.

        summary = Trainer("job.toml").run()

    Args:
        job: a job, or a source that `load_job` takes: a path, a text of TOML, or a dict.
        hooks: training hooks in addition to the job's hooks; they run last.
        catalog: where components are looked up; by default everything installed.
        resume: `auto` continues the run folder's newest checkpoint, `never` refuses a folder that has any, and a path
            names a checkpoint, or a run folder whose newest one is meant, to start from.
        resume_with_changes: continue even if the job has changed in ways that make another run of it.
        echo: receives what a person should read (the plan, what was resumed), on rank 0.
        on_folder: receives the run folder, on every rank, once it is certain that the run goes ahead in it.
    """

    def __init__(
        self,
        job: Job | Source,
        *,
        hooks: Iterable[TrainingHook] = (),
        catalog: Catalog | None = None,
        resume: str = "auto",
        resume_with_changes: bool = False,
        echo: Callable[[str], object] = print,
        on_folder: Callable[[Path], object] = lambda folder: None,
    ) -> None:
        self._hooks: list[TrainingHook] = list(hooks) if isinstance(hooks, Iterable) else [hooks]
        if wrong := [hook for hook in self._hooks if not isinstance(hook, TrainingHook)]:
            raise TypeError(f"hooks are objects of classes derived from forge_core.TrainingHook, not {wrong[0]!r:.60}")
        job = job if isinstance(job, Job) else load_job(job, catalog=catalog)
        self._catalog: Catalog = catalog or (job.checked.catalog if job.checked else Catalog.installed())
        self.job = complete(job, self._catalog)
        self._resume, self._with_changes = resume, resume_with_changes
        self._echo, self._on_folder = echo, on_folder

    def run(self) -> Summary:
        """Build everything, train to the last step, and return the result.

        Raises:
            JobError: the job cannot run as written.
            CheckpointError: a checkpoint is damaged or does not fit, or the job has changed since.
            NonFiniteError: the non-finite policy ended the run.
            EndedElsewhere: another rank has ended the run.
        """
        record = RunFolder(run_folder(self.job))
        beacon = ProgressBeacon()
        with ExitStack() as stack:
            rendezvous = stack.enter_context(_joined_run(self.job, beacon))
            self._check()
            # One job on all ranks before any touches the folder; the folder before collectives, which cannot be ended.
            if rendezvous is not None:
                _agree_on_job(rendezvous, self.job, self._catalog)
                rendezvous.on_rank0("owned", lambda: stack.enter_context(_begun(record)))
            elif global_rank() == 0:
                stack.enter_context(_begun(record))
            ends = stack.enter_context(this_process.recording_end(global_rank(), record.write_end))
            self._on_folder(record.path)  # only now is it certain that the run goes ahead in it
            beacon.enter(Phase.GROUPS)
            context = build_context(self.job, self._catalog, record.path)
            beacon.enter(Phase.SEARCH)
            section = self.job.checkpoint
            checkpoints = Checkpoints(context.build(section.storage), section, section.verify)
            # Before anything is built: data and model may take minutes, and the job may not be allowed to continue.
            start = find_start(self.job, self._catalog, checkpoints, self._resume, self._with_changes)
            beacon.enter(Phase.READING)
            run = build_run(self.job, context, self._hooks, beacon)
            # The stack closes the loop's loader and loggers before it gives up the lock of the folder.
            loop = Loop(run, checkpoints, start, stack, self._echo if global_rank() == 0 else lambda text: None)
            loop.run()
            _meet(rendezvous, beacon)  # before the loggers say that the run has finished
            recorder, end = loop.recorder, loop.context().end()
            recorder.ending = ExitCode(end.code), end.reason
            ends.append(end)
        return Summary(
            step=loop.progress.step,
            loss=recorder.last_loss,
            evaluation=recorder.last_evaluation,
            folder=record.path,
            end=end,
        )

    def _check(self) -> None:
        # Not once more what `load_job` has checked: each check builds the model on the meta device, on every rank.
        checked = self.job.checked
        if checked and checked.catalog is self._catalog and checked.world_size == world_size():
            return
        if problems := check_rules(self.job, self._catalog, world_size()):
            raise JobError(problems)


@contextmanager
def _begun(record: RunFolder) -> Iterator[None]:
    """Own the run folder, which no longer has the end of an earlier start."""
    with owned(record.path, patience_s=LEASE_S):
        record.remove_end()
        yield


@contextmanager
def _joined_run(job: Job, beacon: ProgressBeacon) -> Iterator[Rendezvous | None]:
    """Join the other ranks; while this context lasts, a watchdog watches this rank, and an exception ends all ranks."""
    if (rendezvous := join_ranks(job.launch)) is None:
        yield None  # the caller that created the process group supervises its ranks
        return
    watchdog = Watchdog(rendezvous, beacon, this_process.emit, job.launch.hang_factor)
    try:
        yield rendezvous
        _meet(rendezvous, beacon)  # while the watchdog runs: a rank that had gone could not end one that hangs
    except BaseException as error:
        this_process.end_run(error)
        raise
    finally:
        watchdog.stop()


def _meet(rendezvous: Rendezvous | None, beacon: ProgressBeacon) -> None:
    """Wait until all ranks have come this far: what one of them does at the end may take long, fail or hang."""
    if rendezvous is not None:
        beacon.enter(Phase.END, detail="until all ranks have come to it")
        rendezvous.meet()


def _agree_on_job(rendezvous: Rendezvous, job: Job, catalog: Catalog) -> None:
    """Check that all ranks have the same job, distributions and local files; else rank 0 raises what differs."""
    identity = _identity(job, catalog)
    rendezvous.set("identity", identity)
    # Rank 0 reads a digest of every rank, and whole identities only of those that differ: there may be thousands.
    compared = json.dumps({**identity, "host": ""}, sort_keys=True)
    rendezvous.set("digest", hashlib.sha256(compared.encode()).hexdigest())

    def compare() -> None:
        ranks = range(rendezvous.world.size)
        digests = rendezvous.wait_for("digest", ranks)
        others = [rank for rank in ranks if digests[rank] != digests[0]]
        if differences := _describe(identity, rendezvous.wait_for("identity", others), catalog):
            raise JobError(differences)

    rendezvous.on_rank0("agreed", compare)


def _describe(mine: Mapping[str, Any], identities: Mapping[int, Mapping[str, Any]], catalog: Catalog) -> str:
    """How the jobs and installations of other ranks differ from rank 0's; empty if they do not."""
    by_rank = {rank: list(_differences(mine, theirs, catalog)) for rank, theirs in identities.items()}
    ranks = [rank for rank, differences in by_rank.items() if differences]
    if not ranks:
        return ""
    lines = ["the ranks do not run the same thing; compared with rank 0:"]
    for rank in ranks[:SHOWN]:
        lines += [f"  rank {rank} on {identities[rank]['host']}: {text}" for text in by_rank[rank]]
    if len(ranks) > SHOWN:
        lines.append(f"  and {len(ranks) - SHOWN} more ranks")
    return "\n".join([*lines, "give every machine the same job files, overrides and packages"])


def _identity(job: Job, catalog: Catalog) -> dict[str, Any]:
    known = collect_provenance(job, catalog)
    distributions = known["distributions"].items()
    versions = {name: entry["version"] for name, entry in distributions}
    return {
        "host": socket.gethostname(),
        "job": dump_job(job, catalog),
        "versions": versions | {"torch": known["torch"], "Python": known["python"]},
        "commits": {name: entry.get("commit", "") for name, entry in distributions},
        "files": known["files"],
    }


def _differences(mine: Mapping[str, Any], theirs: Mapping[str, Any], catalog: Catalog) -> Iterator[str]:
    yield from (str(change) for change in text_changes(mine["job"], theirs["job"], catalog))
    for subject in ("versions", "files", "commits"):
        for name in sorted({*mine[subject], *theirs[subject]}):
            here, there = mine[subject].get(name), theirs[subject].get(name)
            if here != there and not (subject == "commits" and not (here and there)):  # git is not on every machine
                yield f"{name}: {_short(subject, here)} -> {_short(subject, there)}"


def _short(subject: str, value: str | None) -> str:
    if value is None:
        return "absent"
    return f"SHA-256 {value[:12]}" if subject == "files" else value
