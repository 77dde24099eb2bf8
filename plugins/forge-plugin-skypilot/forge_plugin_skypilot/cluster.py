"""Type `sky` of kind `cluster`: runs that are managed jobs of SkyPilot."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.errors import Problem
from forge_core.job import Job
from forge_plugin_launch.clusters import Cluster, Status, SubmittedRun
from forge_plugin_skypilot import keys


@frozen(kw_only=True)
class SkyCluster(Cluster):
    """SkyPilot: managed jobs on clouds and Kubernetes, started again after preemptions, failures and exit code 75."""

    infra: str = field(default="", validator=keys.an_infra)
    """Where: cloud[/region[/zone]], such as `aws/us-east-1` or `k8s/my-context`. Empty: where it is cheapest."""
    accelerators: str | tuple[str, ...] = field(default="", validator=keys.some_accelerators)
    """GPUs of a node by SkyPilot's names, `H100:8`; several, if each of them will do. Each GPU gets a rank."""
    gpus_per_node: int = field(default=0, validator=[ge(0), keys.gpus])
    """GPUs of a node; 0: the number in `accelerators`."""
    use_spot: bool = False
    """Preemptible instances."""
    image_id: str = ""
    """Image of the nodes, such as `docker:ghcr.io/team/forge:1.2`; empty: SkyPilot's own."""
    workdir: str = "."
    """Folder of this machine that nodes get a copy of, relative to the working directory, which must be in it. Files
    that `.skyignore` or `.gitignore` names are left out."""
    setup: tuple[str, ...] = field(default=(), validator=keys.shell_lines)
    """Lines of bash on each node before the first start there: `pip install forge-run …`."""
    envs: Mapping[str, str] = field(factory=dict, validator=keys.variables)
    """Environment variables. Values that look like secrets are refused."""
    secrets: tuple[str, ...] = field(default=(), validator=keys.secret_names)
    """Names of variables that are secrets: from this environment where it has them, else from SkyPilot's own."""
    file_mounts: Mapping[str, Any] = field(factory=dict, validator=keys.storages)
    """By path on the nodes: a file or bucket that is copied, or a table such as `{ source = "s3://…", mode =
    "MOUNT_CACHED" }`, which is mounted."""
    volumes: Mapping[str, str] = field(factory=dict, validator=keys.volumes)
    """Volumes of SkyPilot, which nodes share, by path on the nodes."""
    job_recovery: Mapping[str, Any] = field(factory=dict, validator=keys.recovery)
    """When SkyPilot starts the run again: `max_restarts_on_errors` (3), `recover_on_exit_codes` (75), `strategy`."""
    extra: Mapping[str, Any] = field(factory=dict, validator=keys.further)
    """Further keys of the task, by SkyPilot's names: `extra.resources.disk_size = 500`."""

    @property
    def ranks_per_node(self) -> int:
        """One for each GPU, or one."""
        counts = [count for _, count in keys.accelerators_of(self.accelerators)]
        return self.gpus_per_node or next(filter(None, counts), 1)

    @property
    def storage_paths(self) -> Sequence[str]:
        """Of copies, buckets and volumes."""
        return [*self.file_mounts, *self.volumes]

    def run_problems(self, job: Job) -> Iterable[Problem]:
        """Whether checkpoints outlive the nodes, and whether nodes have the paths of the job."""
        from forge_plugin_skypilot.task import run_problems

        return run_problems(self, job)

    def rendered(self, run: SubmittedRun) -> str:
        """The task as YAML."""
        from forge_plugin_skypilot.task import text_of

        return text_of(self, run)

    def submit(self, run: SubmittedRun) -> Iterable[str]:
        """Have SkyPilot launch the task as a managed job."""
        from forge_plugin_skypilot.jobs import launch

        return launch(self, run)

    def status(self, run: SubmittedRun) -> Status:
        """Of the newest managed job of this name. Facts: `recoveries`, `where` and `cause`."""
        from forge_plugin_skypilot.jobs import status_of

        return status_of(run)

    def logs(self, run: SubmittedRun, follow: bool) -> int:
        """Print what the nodes print."""
        from forge_plugin_skypilot.jobs import print_logs

        return print_logs(run, follow=follow)

    def stop(self, run: SubmittedRun) -> Iterable[str]:
        """Cancel the managed job: its processes get SIGTERM, and 30 s to save."""
        from forge_plugin_skypilot.jobs import cancel

        return cancel(run)

    @property
    def stored(self) -> Mapping[str, str]:
        """Paths of the nodes with storage that outlives them, each with `MOUNT`, `MOUNT_CACHED` or `VOLUME`."""
        # A text is a copy; a table is mounted unless it has another mode
        modes = {
            path: str(source.get("mode", "MOUNT")).upper()
            for path, source in self.file_mounts.items()
            if _is_table(source)
        }
        kept = {path: mode for path, mode in modes.items() if mode != "COPY"}
        return {**kept, **dict.fromkeys(self.volumes, "VOLUME")}

    @property
    def recovery(self) -> dict[str, Any]:
        """`job_recovery` of the task."""
        return {"recover_on_exit_codes": [keys.SAVED], "max_restarts_on_errors": 3, **self.job_recovery}

    def copied(self, run: SubmittedRun) -> str:
        """The folder that nodes get a copy of, absolute."""
        return os.path.abspath(run.work / self.workdir)


def _is_table(source: object) -> bool:
    return isinstance(source, Mapping)
