"""How the ranks of a run join before any process group starts, and agree on what they run."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from forge_core.checkpoint.job_diff import text_changes
from forge_core.checkpoint.provenance import collect
from forge_core.config.dump import dump_job
from forge_core.contracts.errors import JobError
from forge_core.job import Job
from forge_core.launch.failure_report import emit, report_of
from forge_core.launch.progress_beacon import ProgressBeacon
from forge_core.launch.rendezvous import Rendezvous, join_rendezvous
from forge_core.launch.watchdog import Watchdog
from forge_core.launch.world import join_world
from forge_core.plugins.catalog import Catalog

SHOWN = 8
"""Ranks whose differences are listed."""


@contextmanager
def joined_run(job: Job, beacon: ProgressBeacon) -> Iterator[Rendezvous | None]:
    """Join the other ranks; while this context lasts, a watchdog watches this rank, and an exception ends all ranks.

    Returns None for a process alone, and in a process group that was there before the run: its maker looks after its
    ranks.

    Raises:
        RanksMissing: rank 0 cannot be reached.
    """
    if dist.is_initialized() or (world := join_world()).alone:
        yield None
        return
    rendezvous = join_rendezvous(world, job.launch.start_timeout_s, job.launch.hang_timeout_s)
    watchdog = Watchdog(rendezvous, beacon)
    watchdog.start()
    try:
        yield rendezvous
    except BaseException as error:
        report(error, rendezvous)
        raise
    finally:
        watchdog.stop()


def report(error: BaseException, rendezvous: Rendezvous | None) -> None:
    """End all ranks, since this one fails and the others would wait for it; shows why unless another was first."""
    if rendezvous is None:
        return
    failure = report_of(rendezvous.world.rank, error)
    if not failure.echo:
        with suppress(Exception):  # the process that serves the store has gone
            if rendezvous.end(failure).rank == failure.rank:
                emit(failure)


def agree_on_job(rendezvous: Rendezvous, job: Job, catalog: Catalog) -> None:
    """Check that all ranks have the same job, the same distributions and the same local files.

    Every rank publishes a digest, and rank 0 compares them. It reads the rest only where they differ.

    Raises:
        JobError: on rank 0, some differ; names the ranks and what differs.
        EndedElsewhere: on the other ranks, then.
        RanksMissing: some ranks did not arrive.
    """
    identity = _identity(job, catalog)
    rendezvous.set("identity", identity)
    rendezvous.set("digest", _digest(identity))

    def compare() -> None:
        ranks = range(rendezvous.world.size)
        digests = rendezvous.wait_for("digest", ranks)
        others = [rank for rank in ranks if digests[rank] != digests[0]]
        differing = describe_differences(identity, rendezvous.wait_for("identity", others), catalog)
        if differing:
            raise JobError(differing)

    rendezvous.on_rank0("agreed", compare)


def describe_differences(mine: Mapping[str, Any], identities: Mapping[int, Mapping[str, Any]], catalog: Catalog) -> str:
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
    known = collect(job, catalog)
    versions = {name: entry["version"] for name, entry in known["distributions"].items()}
    commits = {name: entry.get("commit", "") for name, entry in known["distributions"].items()}
    return {
        "host": socket.gethostname(),
        "job": dump_job(job, catalog),
        "versions": versions | {"torch": known["torch"], "Python": known["python"]},
        "commits": commits,
        "files": known["files"],
    }


def _digest(identity: Mapping[str, Any]) -> str:
    compared = {name: value for name, value in identity.items() if name != "host"}
    return hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()


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
