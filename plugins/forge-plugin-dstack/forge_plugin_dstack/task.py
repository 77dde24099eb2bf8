"""The task of a run: what dstack is given, checked by its own class."""

from __future__ import annotations

import os
import shlex
import string
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.contracts.errors import JobError, Problem
from forge_core.contracts.run_end import ATTEMPT
from forge_core.job import Job
from forge_plugin_dstack.keys import EVENTS
from forge_plugin_launch.clusters import SubmittedRun
from forge_plugin_launch.remote.paths import (
    demand_sendable,
    folder_line,
    has_object_store,
    is_below,
    name_of,
    path_problems,
)
from forge_plugin_launch.remote.starts import GIVE_UP
from forge_plugin_launch.remote.yaml_text import as_yaml, merged

if TYPE_CHECKING:
    from forge_plugin_dstack.cluster import DstackCluster

NODE = "$DSTACK_NODE_RANK"
FIRST_HOST = "$DSTACK_MASTER_NODE_IP"
SUBMISSION = "$DSTACK_RUN_ID"
"""The same for all starts of a run."""


def run_name(name: str) -> str:
    """Name of dstack's run: 2 to 41 lower-case letters, digits and `-`."""
    # At least two characters; the dot is no part of it, so that the name has a digest
    return name_of(name if len(name) > 1 else f"run.{name}", f"{string.ascii_lowercase}{string.digits}-", 41, "run-")


def text_of(cluster: DstackCluster, run: SubmittedRun) -> str:
    """Returns the task of a run as YAML.

    Raises:
        JobError: the nodes would not have a file of the run, something looks like a secret, or dstack's class refuses
            the task.
    """
    from forge_plugin_dstack.vendor import problem_of

    demand_sendable(run, _copied(cluster, run.work))
    document = _task(cluster, run)
    if problem := problem_of(document):
        raise JobError(f"the task is none of dstack: {problem}")
    return as_yaml(document)


def _copied(cluster: DstackCluster, work: Path) -> Path:
    """The folder of this machine that the working directory of the nodes is a copy of.

    Raises:
        JobError: there is none.
    """
    from forge_plugin_dstack.vendor import copies

    found = {os.path.normpath(path): local for path, local in copies(cluster.files).items()}
    local = found.get(".", found.get(cluster.working_dir))
    if local is None:
        raise JobError.at(
            "cluster.files", f'has nothing for {cluster.working_dir}, where the job files must be; add "."'
        )
    return Path(os.path.abspath(work / os.path.expanduser(local)))


def _task(cluster: DstackCluster, run: SubmittedRun) -> dict[str, Any]:
    document: dict[str, Any] = {
        "type": "task",
        "name": run_name(run.name),
        "nodes": cluster.nodes,
        "image": cluster.image,
        # /bin/sh is what an image has otherwise
        "shell": "bash",
        "working_dir": cluster.working_dir,
        "files": list(cluster.files),
        "env": list(cluster.env),
        "volumes": list(cluster.volumes),
        "commands": [*filter(None, _commands(cluster, run))],
        "resources": _resources(cluster),
        "backends": list(cluster.backends),
        "regions": list(cluster.regions),
        "fleets": list(cluster.fleets),
        "spot_policy": cluster.spot_policy,
        "max_price": cluster.max_price,
        "retry": {"on_events": list(EVENTS), "duration": "1d", **cluster.retry},
        # Only the first node finds out that the run is not to be started again
        "stop_criteria": "master-done" if cluster.nodes > 1 else None,
    }
    return merged({key: value for key, value in document.items() if value}, cluster.extra)


def _resources(cluster: DstackCluster) -> dict[str, Any]:
    """`resources` of the task, with the number of GPUs where the file has it in `gpus_per_node`."""
    resources, count = dict(cluster.resources), cluster.gpus_per_node
    if not count:
        return resources
    from forge_plugin_dstack.vendor import gpu_counts

    gpu = resources.get("gpu")
    if gpu is None:
        resources["gpu"] = count
    elif gpu_counts(resources) != (count, count):
        resources["gpu"] = {**gpu, "count": count} if isinstance(gpu, dict) else f"{gpu}:{count}"
    return resources


def _commands(cluster: DstackCluster, run: SubmittedRun) -> Iterator[str]:
    """Yields the commands of each node, which dstack joins by `&&`."""
    yield from cluster.setup
    yield folder_line(run.work, _copied(cluster, run.work))
    yield f'export {ATTEMPT}="{SUBMISSION}"'
    assert run.job is not None, "of a run that is submitted"
    folder = shlex.quote(os.path.join(run.job.job.output, run.job.job.name))
    # dstack goes by no exit code, and has no limit: after every failure it starts a run again, unless that is a success
    starts = (
        f'python3 -m forge_plugin_launch.remote.starts {folder} --attempt "${ATTEMPT}" '
        f"--max-idle {cluster.max_idle_restarts}"
    )
    yield f'{{ [ "{NODE}" != 0 ] || {starts} || {{ [ $? = {GIVE_UP} ] && exit 0; exit 1; }}; }}'
    # `exec`: dstack's signal reaches one process, which must be the program that saves
    yield f"exec {cluster.node_command(run, NODE, FIRST_HOST)}"


def run_problems(cluster: DstackCluster, job: Job) -> Iterator[Problem]:
    """Yields why checkpoints would not outlive the nodes, and which paths the nodes do not have."""
    from forge_plugin_dstack.vendor import mounts

    mounted = mounts(cluster.volumes)
    output = job.job.output
    mount = is_below(output, mounted)
    if not mount:
        allowed = f"must be below {' or '.join(mounted)}" if mounted else "needs a volume: cluster.volumes"
        yield Problem("job.output", f"{output!r} would be lost with the nodes; it {allowed}")
    elif cluster.nodes > 1 and not mounted[mount] and not has_object_store(job):
        message = (
            f"{mount} is a network volume, which one node has, and {cluster.nodes} nodes save together; mount a file "
            'system that they share ("/mnt/nfs:/runs"), or write [checkpoint.storage] type = "objects"'
        )
        yield Problem("job.output", message)
    if cluster.spot_policy != "on-demand" and not job.checkpoint.interval and not job.checkpoint.interval_minutes:
        message = "spot instances may go without time to save, and this job saves only at its end; set interval_minutes"
        yield Problem("checkpoint.interval", message)
    yield from path_problems(job, [*cluster.node_paths, *cluster.storage_paths], _copied(cluster, Path.cwd()))
