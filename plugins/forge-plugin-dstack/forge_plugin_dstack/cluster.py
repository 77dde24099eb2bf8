"""Type `dstack` of kind `cluster`: runs that are distributed tasks of dstack."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.errors import Problem
from forge_core.job import Job
from forge_plugin_dstack import keys
from forge_plugin_launch.clusters import Cluster, Status, SubmittedRun


@frozen(kw_only=True)
class DstackCluster(Cluster):
    """dstack: distributed tasks on clouds, Kubernetes and fleets, started again after interruptions and failures."""

    image: str = ""
    """Image of the containers, with Forge and the distributions that the job names; empty: dstack's own."""
    # Before `resources`, whose validator reads it
    gpus_per_node: int = field(default=0, validator=ge(0))
    """GPUs of a node; 0: the number in `resources.gpu`."""
    resources: Mapping[str, Any] = field(factory=dict, validator=keys.resources)
    """What a node must have, by dstack's names: `gpu = "H100:8"`, `cpu = "64.."`, `shm_size = "64GB"`. Each GPU gets a
    rank."""
    backends: tuple[str, ...] = field(default=(), validator=keys.by_dstack)
    """Clouds, such as `aws` and `kubernetes`; empty: all of the project."""
    regions: tuple[str, ...] = field(default=(), validator=keys.by_dstack)
    """Regions; empty: all."""
    fleets: tuple[str, ...] = field(default=(), validator=keys.by_dstack)
    """Fleets; empty: all of the project. Several nodes want one with `placement: cluster`."""
    spot_policy: Literal["on-demand", "spot", "auto"] = "on-demand"
    """Preemptible instances: none, only, or first."""
    max_price: float = field(default=0.0, validator=ge(0))
    """Largest price of an instance, in dollars per hour; 0: any."""
    env: tuple[str, ...] = field(default=(), validator=keys.variables)
    """Environment variables as dstack has them: `NCCL_DEBUG=WARN`, or a name alone, whose value comes from the
    environment of `forge-run submit`, or `HF_TOKEN=${{ secrets.hf }}`. Values that look like secrets are refused."""
    volumes: tuple[str, ...] = field(default=(), validator=keys.by_dstack)
    """Storage, `NAME:PATH` of a network volume or `FOLDER:PATH` of a folder of the instances. `job.output` must be in
    one of them."""
    files: tuple[str, ...] = field(default=(".",), validator=keys.by_dstack)
    """Files and folders that nodes get a copy of, `LOCAL` or `LOCAL:PATH`, relative to the working directories. What
    `.gitignore` and `.dstackignore` name is left out."""
    working_dir: str = field(default="/workflow", validator=keys.a_working_dir)
    """Working directory in the containers."""
    setup: tuple[str, ...] = field(default=(), validator=keys.without_tokens)
    """Commands on each node before each start: `pip install forge-run …`."""
    retry: Mapping[str, Any] = field(factory=dict, validator=keys.retries)
    """After what dstack starts the run again: `on_events` (all three) and `duration` (1d)."""
    max_idle_restarts: int = field(default=3, validator=ge(0))
    """Starts in a row without a new checkpoint, after which the run ends: dstack itself counts none."""
    extra: Mapping[str, Any] = field(factory=dict, validator=keys.further)
    """Further keys of the task, by dstack's names: `extra.idle_duration = "30m"`."""

    @property
    def ranks_per_node(self) -> int:
        """One for each GPU, or one."""
        if self.gpus_per_node or "gpu" not in self.resources:
            return self.gpus_per_node or 1
        from forge_plugin_dstack.vendor import gpu_counts

        return gpu_counts(self.resources)[0] or 1

    @property
    def storage_paths(self) -> Sequence[str]:
        """Of volumes and copies."""
        from forge_plugin_dstack.vendor import copies, mounts

        placed = [os.path.join(self.working_dir, path) for path in copies(self.files)]
        return [*mounts(self.volumes), *placed]

    def run_problems(self, job: Job) -> Iterable[Problem]:
        """Whether checkpoints outlive the nodes, and whether nodes have the paths of the job."""
        from forge_plugin_dstack.task import run_problems

        return run_problems(self, job)

    def rendered(self, run: SubmittedRun) -> str:
        """The task as YAML."""
        from forge_plugin_dstack.task import text_of

        return text_of(self, run)

    def submit(self, run: SubmittedRun) -> Iterable[str]:
        """Have dstack apply the task."""
        from forge_plugin_dstack.runs import apply

        return apply(self, run)

    def status(self, run: SubmittedRun) -> Status:
        """Of dstack's run. Facts: `attempts`, `cost` in dollars, `where` and `cause`."""
        from forge_plugin_dstack.runs import status_of

        return status_of(run)

    def logs(self, run: SubmittedRun, follow: bool) -> int:
        """Print what the first node prints."""
        from forge_plugin_dstack.runs import print_logs

        return print_logs(run, follow=follow)

    def stop(self, run: SubmittedRun) -> Iterable[str]:
        """Stop the run: its processes get SIGINT, and 10 s to save."""
        from forge_plugin_dstack.runs import stop

        return stop(run)
