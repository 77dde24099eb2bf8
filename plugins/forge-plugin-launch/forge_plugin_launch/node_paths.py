"""Jobs that read files which only the nodes of a cluster have: the rest is checked here, and the files there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs

from forge_core.config.load import load_job
from forge_core.contracts.errors import JobError, Problem
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_plugin_launch.clusters import Cluster
from forge_plugin_launch.remote.paths import is_below
from forge_plugin_launch.remote.secret_values import texts

OUTPUT = "job.output"


def load_for(
    cluster: Cluster, files: Sequence[str], overrides: Sequence[str], catalog: Catalog
) -> tuple[Job, Sequence[str]]:
    """Returns a job, checked with the ranks that it will have on a cluster, and lines about what was not checked.

    Files that are not on this machine, and lie below a path of the nodes, are left to the check with which each rank
    begins.

    Raises:
        JobError: the job cannot run as written; lists every problem.
    """
    load = partial(load_job, *files, overrides=overrides, catalog=catalog, world_size=cluster.world_size)
    try:
        return load(), ()
    except JobError as error:
        if not (cluster.node_paths or cluster.storage_paths):
            raise
        problems = error.problems
        try:
            job = load(with_data=False)
        # Wrong apart from its files, too; all of it in one message
        except JobError:
            raise error from None
    absent = [paths_of_nodes(problem, job, cluster) for problem in problems]
    if left := [problem for problem, paths in zip(problems, absent, strict=True) if not paths]:
        raise JobError(left)
    # That a run folder is still to be made is no news
    found = [(each, paths) for each, paths in zip(problems, absent, strict=True) if each.path != OUTPUT]
    return job, [f"{each.path}: not here, so the nodes check it: {', '.join(paths)}" for each, paths in found]


def paths_of_nodes(problem: Problem, job: Job, cluster: Cluster) -> list[str]:
    """Returns the paths that a problem is about, if only nodes have them; empty if one of them should be here.

    Args:
        problem: of a job whose files are checked.
        job: the same, whose files are not.
        cluster: whose nodes they are.
    """
    # Not on local disks, with which it would be lost
    places = cluster.storage_paths if problem.path == OUTPUT else [*cluster.node_paths, *cluster.storage_paths]
    value = _value_at(job, problem.path)
    named = texts(os.fspath(value) if isinstance(value, os.PathLike) else value)
    absent = [text for _, text in named if not os.path.exists(os.path.expanduser(text))]
    return absent if all(is_below(text, places) for text in absent) else []


def _value_at(job: Job, path: str) -> Any:
    """The value of a key; None where a default stands in for its table."""
    value: Any = job
    for key in path.split("."):
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list | tuple):
            value = value[int(key)]
        else:
            value = getattr(value, key, None) if attrs.has(type(value)) else None
    return value
