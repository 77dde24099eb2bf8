"""How ranks agree: on the job, before any process group starts, and on requests to stop and save, in every step."""

from __future__ import annotations

import hashlib
import json
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from forge_core.checkpoint.run_diff import collect_provenance, text_changes
from forge_core.config.load import dump_job
from forge_core.contracts.contexts import Requests
from forge_core.contracts.errors import JobError
from forge_core.job import Job, TrainSection
from forge_core.launch.rank_process import this_process
from forge_core.launch.watchdog import Watchdog
from forge_core.launch.world import join_world
from forge_core.parallel.mesh import any_rank, gather_objects

if TYPE_CHECKING:
    from forge_core.checkpoint.saving import Saver
    from forge_core.checkpoint.state import Progress
    from forge_core.engine.build import Run
    from forge_core.launch.progress_beacon import ProgressBeacon
    from forge_core.launch.rendezvous import Rendezvous
    from forge_core.plugins.catalog import Catalog

SHOWN = 8
"""Ranks whose differences are listed."""


@contextmanager
def joined_run(job: Job, beacon: ProgressBeacon) -> Iterator[Rendezvous | None]:
    """Join the other ranks; while this context lasts, a watchdog watches this rank, and an exception ends all ranks."""
    # None for a process alone, and in a process group that was there before the run: its maker looks after its ranks.
    if dist.is_initialized() or (world := join_world()).alone:
        yield None
        return
    rendezvous = this_process.join(world, job.launch.start_timeout_s, job.launch.hang_timeout_s)
    watchdog = Watchdog(rendezvous, beacon, this_process.emit)
    try:
        yield rendezvous
    except BaseException as error:
        this_process.end_run(error)
        raise
    finally:
        watchdog.stop()


def agree_on_job(rendezvous: Rendezvous, job: Job, catalog: Catalog) -> None:
    """Check that all ranks have the same job, the same distributions and the same local files.

    Raises:
        JobError: on rank 0, some differ; names the ranks and what differs.
        EndedElsewhere: on the other ranks, then.
        RanksMissing: some ranks did not arrive.
    """
    identity = _identity(job, catalog)
    rendezvous.set("identity", identity)
    # Rank 0 reads a digest of every rank, and whole identities only of those that differ: there may be thousands.
    compared = json.dumps({**identity, "host": ""}, sort_keys=True)
    rendezvous.set("digest", hashlib.sha256(compared.encode()).hexdigest())

    def compare() -> None:
        ranks = range(rendezvous.world.size)
        digests = rendezvous.wait_for("digest", ranks)
        others = [rank for rank in ranks if digests[rank] != digests[0]]
        differences = _describe(identity, rendezvous.wait_for("identity", others), catalog)
        if differences:
            raise JobError(differences)

    rendezvous.on_rank0("agreed", compare)


def _describe(mine: Mapping[str, Any], identities: Mapping[int, Mapping[str, Any]], catalog: Catalog) -> str:
    """How the jobs and installations of other ranks differ from those of rank 0; empty if they do not."""
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


@contextmanager
def stop_on_signals(requests: Requests) -> Iterator[None]:
    """SIGINT, SIGTERM, SIGUSR1 and the launcher set `requests.stop` within this context; in the main thread only."""

    def ask(number: signal.Signals) -> None:
        # Nothing else happens here: a signal comes at any point of a step, perhaps in the middle of a collective, and
        # on each rank at another. The ranks end together, where they agree.
        requests.stop = requests.stop or f"signal {number.name}"

    with this_process.delivering_stop_requests(ask):
        yield


def follow_non_finite(train: TrainSection, progress: Progress, requests: Requests, record: Mapping[str, Any]) -> None:
    """Count a step if it was skipped, and ask for the end of the run after too many in a row (`train.non_finite`)."""
    limit = 1 if train.non_finite == "stop" else train.non_finite_limit
    # Here and not where the update was skipped: with `found_inf` the host learns of it up to two steps later.
    progress.skipped += bool(record.get("skipped"))
    progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if record.get("skipped") else 0
    if progress.skipped_in_a_row >= limit and not requests.non_finite:
        row = f"{limit} step{'s' if limit > 1 else ''} in a row"
        requests.non_finite = f"loss or gradients were not finite for {row}, up to step {record['step']}"


class Agreement:
    """The one point of a step at which ranks agree on what was asked of any of them."""

    # Signals and hooks ask each rank at its own time. A rank that acted on that at once would leave the others waiting
    # in their next collective; so a request that comes later, during an evaluation say, waits for the next step.

    def __init__(self, run: Run, requests: Requests, saver: Saver) -> None:
        self._beacon = run.hooks.beacon
        self._alone = run.context.layout.world_size == 1
        self._requests = requests
        self._saver = saver
        self._agreed_to_end = False

    @property
    def ends_run(self) -> bool:
        """Whether all ranks have agreed to end; a process alone need not ask."""
        return self._requests.ends_run if self._alone else self._agreed_to_end

    def reach(self) -> bool:
        """Agree on whether to end, and return whether to save. Collective."""
        self._beacon.enter("agreement of the ranks")
        requests = self._requests
        asked = [bool(requests.stop), requests.checkpoint, bool(requests.non_finite), self._saver.writing]
        stop, checkpoint, non_finite, writing = asked if self._alone else any_rank(asked)
        # Texts travel only in the step in which ranks have agreed that there is one: other steps cost four flags.
        if stop:
            requests.stop = agreed_reason(requests.stop)
        if non_finite:
            requests.non_finite = agreed_reason(requests.non_finite)
        self._agreed_to_end = stop or non_finite
        if not writing:  # on any rank: only now is a checkpoint that was written in the background whole
            self._saver.settle()
        return checkpoint


def agreed_reason(own: str) -> str:
    """The reason of this rank for what was asked, or else that of the first rank that has one. Collective."""
    reasons = gather_objects(own)
    return own or next((f"{reason} (rank {rank})" for rank, reason in enumerate(reasons) if reason), "")
