"""How the ranks of a run come together before any process group starts, and how they are watched from then on."""

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
from forge_core.config.job import Job
from forge_core.contracts.errors import JobError
from forge_core.launch.failure_report import speak, words_for
from forge_core.launch.progress_beacon import Phases
from forge_core.launch.rendezvous import Meeting, meet
from forge_core.launch.watchdog import Watch
from forge_core.launch.world import join_world
from forge_core.plugins.catalog import Catalog

SHOWN = 8
"""Ranks of which it is told what differs."""


@contextmanager
def together(job: Job, phases: Phases) -> Iterator[Meeting | None]:
    """While this context lasts, this rank is watched, and what it raises ends all ranks. None for a process alone, and
    in a process group that was there before the run: whoever made that looks after its ranks.

    Raises:
        Absent: rank 0 cannot be reached.
    """
    if dist.is_initialized() or (world := join_world()).alone:
        yield None
        return
    meeting = meet(world, job.launch.start_timeout_s, job.launch.hang_timeout_s)
    watch = Watch(meeting, phases)
    watch.start()
    try:
        yield meeting
    except BaseException as error:
        report(error, meeting)
        raise
    finally:
        watch.stop()


def report(error: BaseException, meeting: Meeting | None) -> None:
    """Let all ranks know that this one fails, so that they do not wait for it, and the person, unless another rank came
    first."""
    words = words_for(meeting.world.rank, error) if meeting is not None else None
    if meeting is not None and words is not None and not words.echo:
        with suppress(Exception):  # whoever serves the store has gone
            if meeting.end(words).rank == words.rank:
                speak(words)


def agree_on_job(meeting: Meeting, job: Job, catalog: Catalog) -> None:
    """See that all ranks have come with the same job, the same distributions and the same local files.

    Every rank publishes a digest, and rank 0 compares them. It looks closer only where they differ.

    Raises:
        JobError: on rank 0, some differ; names the ranks and what differs.
        EndedElsewhere: on the other ranks, then.
        Absent: some ranks did not come.
    """
    identity = _identity(job, catalog)
    meeting.tell("identity", identity)
    meeting.tell("digest", _digest(identity))

    def compare() -> None:
        ranks = range(meeting.world.size)
        digests = meeting.wait_for("digest", ranks)
        others = [rank for rank in ranks if digests[rank] != digests[0]]
        differing = describe_differences(identity, meeting.wait_for("identity", others), catalog)
        if differing:
            raise JobError(differing)

    meeting.on_first("agreed", compare)


def describe_differences(mine: Mapping[str, Any], identities: Mapping[int, Mapping[str, Any]], catalog: Catalog) -> str:
    """In what the jobs and installations of other ranks differ from those of rank 0; empty if in nothing."""
    found = {rank: list(_differences(mine, theirs, catalog)) for rank, theirs in identities.items()}
    ranks = [rank for rank, differences in found.items() if differences]
    if not ranks:
        return ""
    lines = ["the ranks do not run the same thing; compared with rank 0:"]
    for rank in ranks[:SHOWN]:
        lines += [f"  rank {rank} on {identities[rank]['host']}: {text}" for text in found[rank]]
    if len(ranks) > SHOWN:
        lines.append(f"  and {len(ranks) - SHOWN} more ranks")
    return "\n".join([*lines, "give every machine the same job files, overrides and packages"])


def _identity(job: Job, catalog: Catalog) -> dict[str, Any]:
    known = collect(job, catalog)
    versions = {name: told["version"] for name, told in known["distributions"].items()}
    commits = {name: told.get("commit", "") for name, told in known["distributions"].items()}
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
    for what in ("versions", "files", "commits"):
        for name in sorted({*mine[what], *theirs[what]}):
            here, there = mine[what].get(name), theirs[what].get(name)
            if here != there and not (what == "commits" and not (here and there)):  # git is not on every machine
                yield f"{name}: {_short(what, here)} -> {_short(what, there)}"


def _short(what: str, value: str | None) -> str:
    if value is None:
        return "absent"
    return f"SHA-256 {value[:12]}" if what == "files" else value
