"""The logger `mlflow`."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from forge_core.checkpoint.run_folder import JOB
from forge_core.contracts.errors import ExitCode, ForgeError
from forge_kit.tools.outputs import mark_output
from forge_kit.tools.tracking import TrackedRun, is_sent, numbers
from forge_plugin_mlflow.outbox import Item, Outbox

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_plugin_mlflow.mlflow_component import MLflow

BATCH = 20
"""Lines of one request; MLflow takes 1,000 numbers at a time."""
MOST_NUMBERS, MOST_PARAMETERS, LONGEST_PARAMETER = 1000, 100, 6000
"""Limits of MLflow's API."""
FORBIDDEN = re.compile(r"[^\w\-. :/]")
UNSENT = "mlflow-unsent.jsonl"
FILES = "mlflow-unsent"
"""Folder of files that wait, in the run folder."""
STATUS = {ExitCode.FINISHED: "FINISHED", ExitCode.STOPPED: "SCHEDULED"}
"""MLflow's status of a run that ended with an exit code; of others, FAILED."""


class MLflowLogger:
    """See `forge_core.contracts.runtime.Logger`."""

    def __init__(self, component: MLflow, context: BuildContext) -> None:
        self._component, self._context = component, context
        self._output = Path(context.job.job.output).absolute()
        self._status, self._reason = "FAILED", ""  # unless `end` reports how the run ended

    def start(self, step: int) -> None:
        """Begin the run at MLflow, or continue it; a server that refuses or is away is an error before any step."""
        # MLflow tries again for minutes by itself: at the start nobody shall wait so long, and later the outbox does it
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(int(self._component.timeout_s) or 1))
        uri = self._component.uri(str(self._output))
        self._tracked = run = TrackedRun.begin(self._component, "mlflow", self._context, step)
        if not step:  # what an earlier run in this folder could not send is stale
            (run.folder / UNSENT).unlink(missing_ok=True)
            shutil.rmtree(run.folder / FILES, ignore_errors=True)
        try:
            self._client = MlflowClient(tracking_uri=uri)
            self._run_id = self._open_run(uri)
            self._client.update_run(self._run_id, status="RUNNING")
            self._note_job()
        except Exception as error:
            if isinstance(error, ForgeError):
                raise
            message = f"MLflow at {uri} did not take the run: {error}"
            raise ForgeError(f"{message}; check tracking_uri, and MLFLOW_TRACKING_USERNAME and _PASSWORD") from error
        # Lines after the checkpoint are made again, and the end was not the end.
        keep = lambda item: "status" not in item and item.get("step", 0) <= step  # noqa: E731
        self._outbox = Outbox(run.folder / UNSENT, self._deliver, BATCH, f"MLflow at {uri}", keep)

    def log(self, record: Mapping[str, Any]) -> None:
        """Puts the numbers of a line into the outbox, and counts of layers as a file; never waits for the server."""
        if not is_sent(record, self._component.interval):
            return
        # MLflow's times are in milliseconds
        step, at = record["step"], int(1000 * record.get("time", time.time()))
        self._outbox.put({"step": step, "at": at, "numbers": [(n, repr(v)) for n, v in numbers(record).items()]})
        if self._tracked.takes_counts(record, self._component.counts_interval):
            path = self._waiting_file(f"counts-{step}.json")
            path.write_text(json.dumps(record["counts"]))
            self._outbox.put({"file": str(path), "name": f"step-{step}.json", "folder": "counts"})

    def artifact(self, path: Path, name: str, step: int) -> None:
        """Copy the file, which may change, and send the copy."""
        copy = self._waiting_file(f"{time.monotonic_ns()}-{Path(name).name}")
        shutil.copyfile(path, copy)
        self._outbox.put({"file": str(copy), "name": Path(name).name, "folder": f"step-{step}"})

    def flush(self) -> None:
        """Save the unsent items, so that a run that continues from this checkpoint sends them."""
        self._outbox.save()

    def end(self, code: int, reason: str) -> None:
        """Keeps status and reason for `close`, which delivers them after everything else."""
        self._status, self._reason = STATUS.get(ExitCode(code), "FAILED"), reason

    def close(self) -> None:
        """Delivers the end of the run last. What the server does not take in `timeout_s` stays in the run folder."""
        self._outbox.put({"status": self._status, "reason": self._reason})
        if left := self._outbox.close(self._component.timeout_s):
            message = f"MLflow did not take everything: {left} deliveries are in {self._tracked.folder / UNSENT}"
            warnings.warn(f"{message}, and are sent when the run is continued", stacklevel=2)
        with suppress(OSError):  # not empty: files wait in it; or no file was ever handed on
            (self._tracked.folder / FILES).rmdir()

    def _files_beside_database(self) -> Path:
        folder = self._output / "mlflow-files"
        folder.mkdir(parents=True, exist_ok=True)
        mark_output(folder)  # pictures of losses are no data
        return folder

    def _open_run(self, uri: str) -> str:
        """Returns MLflow's id of the run, which is a tag of it, so that no other record must be kept."""
        run, client = self._tracked, self._client
        experiment = client.get_experiment_by_name(run.project)
        place = self._files_beside_database().as_uri() if uri.startswith("sqlite:") else None
        number = experiment.experiment_id if experiment else client.create_experiment(run.project, place)
        found = client.search_runs([number], f"tags.`forge.id` = '{run.id}'", max_results=1)
        if found:
            return found[0].info.run_id
        if not run.is_new:
            advice = 'restore it there, or set branch = "again" for a new one'
            raise ForgeError(f"the run {run.id} is gone from the experiment {run.project!r} of MLflow; {advice}")
        tags = dict(_tag(tag) for tag in self._component.tags)
        return client.create_run(number, run_name=run.name, tags={**tags, "forge.id": run.id}).info.run_id

    def _note_job(self) -> None:
        """Record the resolved job: of the first start as parameters, which cannot change; the newest as a file."""
        run = self._tracked
        self._client.set_tag(self._run_id, "forge.starts", ", ".join(map(str, run.starts)))
        if run.is_new:
            pairs = [Param(FORBIDDEN.sub("_", key), value[:LONGEST_PARAMETER]) for key, value in _flat(run.config())]
            for first in range(0, len(pairs), MOST_PARAMETERS):
                self._client.log_batch(self._run_id, params=pairs[first : first + MOST_PARAMETERS])
        if (job := run.folder / JOB).exists():
            self._client.log_artifact(self._run_id, str(job))

    def _waiting_file(self, name: str) -> Path:
        folder = self._tracked.folder / FILES
        folder.mkdir(exist_ok=True)
        return folder / name

    def _deliver(self, items: Sequence[Item]) -> None:
        """Send lines, files and the end, in order; a repetition of what was sent changes nothing."""
        lines = [item for item in items if "numbers" in item]
        points = [
            Metric(FORBIDDEN.sub("_", name), float(value), item["at"], item["step"])
            for item in lines
            for name, value in item["numbers"]
        ]
        for first in range(0, len(points), MOST_NUMBERS):
            self._client.log_batch(self._run_id, metrics=points[first : first + MOST_NUMBERS])
        for item in items:
            if "file" in item:
                self._send_file(Path(item["file"]), item["name"], item["folder"])
            elif "status" in item:
                tags = [RunTag("forge.ended", item["reason"] or "finished")]
                self._client.log_batch(self._run_id, tags=tags)
                self._client.set_terminated(self._run_id, item["status"])

    def _send_file(self, path: Path, name: str, folder: str) -> None:
        if path.exists():  # else it was sent, and a later item of the same batch was not
            named = path.parent / f"{path.name}.d" / name  # MLflow takes the name of the file
            named.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, named)
            self._client.log_artifact(self._run_id, str(named), folder)
            shutil.rmtree(named.parent)
            path.unlink()


def _tag(text: str) -> tuple[str, str]:
    """MLflow's tags are pairs: `team=vision` is one, and a word alone has the value `true`."""
    name, separator, value = text.partition("=")
    return (name, value) if separator else (name, "true")


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Keys of a job with their paths: `data.sources.0.path`."""
    if isinstance(value, Mapping | list):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in pairs:
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, str(value)
