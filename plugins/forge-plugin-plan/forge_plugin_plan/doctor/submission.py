"""`forge-run doctor --on`: a short run on all ranks of a cluster, submitted as any other, and its report."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from attrs import frozen

from forge_core.contracts.errors import ExitCode, JobError
from forge_kit.tools.json_output import print_json
from forge_kit.tools.outputs import MARK, output_file
from forge_plugin_launch.clusters import Cluster, Status, SubmittedRun, read_cluster
from forge_plugin_launch.submit import Request
from forge_plugin_plan.doctor.cluster_check import FILE
from forge_plugin_plan.doctor.results import Result, State

JOB_FILE = "doctor.toml"
"""In the working directory, where every type of cluster finds job files."""
POLL_S = 5.0
"""Seconds between two looks at a run that is waited for."""
ENDS = ("finished", "failed", "stopped")
JOB = """\
# {mark}: of `forge-run doctor --on {on}`
[job]
name = {name}
output = {output}

[train]
steps = 4
global_batch_size = {ranks}
micro_batch_size = 1
seq_len = 16

[model]
type = "transformer"
dim = 64
layers = 2
attention = {{ heads = 2 }}

[data.tokenizer]
type = "bytes"

[[data.sources]]
type = "python_stdlib"

[optimizer]
type = "adamw"

# A rank that does not come, or hangs, is named soon
[launch]
hang_timeout_s = 120

[hooks.cluster_check]
step = 2
"""


@frozen(kw_only=True)
class Trial:
    """A run that checks a cluster."""

    on: str
    """The cluster file."""
    settings: Sequence[str]
    """Keys of the cluster from the command line: `cluster.nodes=2`."""
    cluster: Cluster
    text: str
    """The job."""

    @classmethod
    def of(
        cls, on: str, settings: Sequence[str], files: Sequence[str], overrides: Sequence[str], output: str | None
    ) -> Self:
        """Returns the run for a cluster, with the run folders of a job, or `output`.

        Raises:
            JobError: the cluster file is wrong, or the job cannot run on its ranks.
        """
        cluster, problems = read_cluster(on, settings)
        if files:
            # Checked here already, as the ranks that the cluster has are what the job is to run on
            job = Request(groups=[files], overrides=overrides, cluster=cluster).check(problems)[0].job
            assert job is not None, "of a checked request"
            output = output or job.job.output
        elif problems:
            raise JobError([*problems])
        # By the second, so that one doctor does not continue the run of another
        name = time.strftime("doctor-%Y%m%d-%H%M%S")
        text = JOB.format(
            mark=MARK, on=on, name=json.dumps(name), output=json.dumps(output or "runs"), ranks=cluster.world_size
        )
        return cls(on=on, settings=settings, cluster=cluster, text=text)

    def rendered(self) -> str:
        """Returns what would be submitted; the job file is there only as long as it is read."""
        path = output_file(Path(JOB_FILE), "doctor --on")
        before = path.read_text() if path.exists() else None
        try:
            self._write()
            return self.cluster.rendered(self._run())
        finally:
            if before is None:
                path.unlink(missing_ok=True)
            else:
                path.write_text(before)

    def submit(self, wait_s: float, is_json: bool) -> int:
        """Submit the run, and wait for its report; returns the exit code of the command.

        Args:
            wait_s: seconds to wait; 0: only submit.
            is_json: print the report as JSON, and nothing else.

        Raises:
            JobError: the cluster takes nothing, or there is no report in time.
        """
        self._write()
        run = self._run()
        lines = list(self.cluster.submit(run))
        look = f"forge-run submit {JOB_FILE} --on {self.on}{''.join(f' --{word}' for word in self.settings)}"
        if not is_json:
            print(*lines, f"  its job: {JOB_FILE}; its report: {look} --logs, and {run.folder / FILE}", sep="\n")
        if not wait_s:
            return ExitCode.FINISHED
        status = self._ended(run, time.monotonic() + wait_s)
        if status.state not in ENDS:
            raise JobError(
                f"{run.name} is {status.state} after {wait_s / 60:g} minutes: {status.words}; see {look} --status"
            )
        return self._report(run, status, is_json)

    def _ended(self, run: SubmittedRun, deadline: float) -> Status:
        while (status := self.cluster.status(run)).state not in ENDS and time.monotonic() < deadline:
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
        return status

    def _report(self, run: SubmittedRun, status: Status, is_json: bool) -> int:
        path = run.folder / FILE
        # On another file system the report is where the run printed it
        if not path.is_file():
            if is_json:
                raise JobError(f"{path} is not here, so that there is no report as JSON; the run has {status.state}")
            self.cluster.logs(run, False)
            return ExitCode.FINISHED if status.state == "finished" else ExitCode.FAILED
        report = json.loads(path.read_text())
        if is_json:
            print_json(report)
        else:
            _show(report)
        is_sound = status.state == "finished" and all(check["state"] != State.FAILED for check in report["checks"])
        return ExitCode.FINISHED if is_sound else ExitCode.FAILED

    def _run(self) -> SubmittedRun:
        [run] = Request(groups=[[JOB_FILE]], overrides=[], cluster=self.cluster).check([])
        return run

    def _write(self) -> None:
        output_file(Path(JOB_FILE), "doctor --on").write_text(self.text)


def _show(report: Mapping[str, Any]) -> None:
    from forge_plugin_plan.doctor.examination import Examined, counts
    from forge_plugin_plan.doctor.screen import Screen

    screen, examined = Screen(), []
    for check in report["checks"]:
        result = Result(check["name"], State(check["state"]), check["seen"], check["mend"])
        examined.append(Examined(check["group"], result, check["seconds"]))
        screen.show(examined[-1])
    found = ", ".join(f"{count} {state}" for state, count in counts(examined).items())
    print(f"\n{found}; {report['ranks']} ranks on {', '.join(report['hosts'])}, {report['seconds']:.0f} s")
