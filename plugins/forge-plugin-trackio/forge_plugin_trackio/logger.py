"""The logger `trackio`."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_core.contracts.errors import ExitCode, ForgeError
from forge_kit.tools.tracking import TrackedRun, count_rows, is_sent, numbers

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_plugin_trackio.trackio_component import Trackio

PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".webp")
PATIENCE_S = 20.0
"""Longest wait for a server's answer at the start."""


class TrackioLogger:
    """See `forge_core.contracts.runtime.Logger`."""

    def __init__(self, component: Trackio, context: BuildContext) -> None:
        self._component, self._context = component, context

    def start(self, step: int) -> None:
        """Begin the run in trackio, or continue it; a server that does not answer is an error before the first step."""
        component = self._component
        self._trackio = _trackio_in(component.folder)
        if component.server_url:
            _refuse_silent_server(component.server_url)
        self._tracked = run = TrackedRun.begin(component, "trackio", self._context, step)
        try:
            self._run = self._trackio.init(
                component.project,
                name=f"{run.name}-{run.id}",
                group=component.group or None,
                space_id=component.space_id or None,
                server_url=component.server_url or None,
                config={**run.config(), "tags": list(component.tags)},
                resume="never" if run.is_new else "allow",
                embed=False,
                auto_log_gpu=component.system,
                auto_log_cpu=component.system,
            )
        except Exception as error:
            raise ForgeError(f"trackio did not take the run: {error}") from error

    def log(self, record: Mapping[str, Any]) -> None:
        """Queue a line; a thread of trackio writes or sends it."""
        if not is_sent(record, self._component.interval):
            return
        values: dict[str, Any] = {**numbers(record), "attempt": self._tracked.attempt}
        if self._tracked.takes_counts(record, self._component.counts_interval):
            for name, counts in count_rows(record).items():
                edges = np.arange(len(counts) + 1)  # a bar an expert
                values[name] = self._trackio.Histogram(np_histogram=(np.array(counts, dtype=float), edges))
        self._run.log(values, step=record["step"])

    def artifact(self, path: Path, name: str, step: int) -> None:
        """A version of an artefact of trackio, by content; a picture is also shown beside the curves."""
        own = self._trackio.Artifact(f"{self._run.name}-{name}".replace("/", "-"), "file", metadata={"step": step})
        own.add_file(path)
        self._run.log_artifact(own)
        if path.suffix.lower() in PICTURES:
            self._run.log({f"files/{name}": self._trackio.Image(str(path))}, step=step)

    def end(self, code: int, reason: str) -> None:
        levels = self._trackio.AlertLevel
        if reason:  # otherwise it is finished, which is no news
            failed = code not in (ExitCode.FINISHED, ExitCode.STOPPED)
            title = "failed" if failed else "to be continued" if code else "ended before its last step"
            self._run.alert(f"{self._run.name}: {title}", reason, level=levels.ERROR if failed else levels.INFO)

    def close(self) -> None:
        """Write or send the queued data. Data that a server does not accept is sent when the project is next opened."""
        self._run.finish()


def _trackio_in(folder: str) -> Any:
    """Import trackio, which determines the location of its files only once."""
    wanted = str(Path(folder).absolute()) if folder else ""
    if wanted and "trackio" not in sys.modules:
        os.environ["TRACKIO_DIR"] = wanted
    import trackio

    actual = trackio.utils.TRACKIO_DIR
    if wanted and Path(wanted) != Path(actual):
        raise ForgeError(f"trackio keeps its files in {actual} for this process, so not in {wanted}; set TRACKIO_DIR")
    return trackio


def _refuse_silent_server(url: str) -> None:
    # Without the write token, which an error must not show
    address = urllib.parse.urlsplit(url)._replace(query="", fragment="").geturl()
    try:
        urllib.request.urlopen(address, timeout=PATIENCE_S).close()  # noqa: S310  `problems` has seen that it is http
    except urllib.error.HTTPError:
        return  # it answers
    except OSError as error:
        reason = getattr(error, "reason", error)
        advice = "start it (`trackio show`), or leave server_url out"
        raise ForgeError(f"the trackio server {address} does not answer: {reason}; {advice}") from error
