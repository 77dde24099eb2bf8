"""The logger `prometheus`."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Gauge, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from forge_core.contracts.errors import ExitCode, ForgeError

if TYPE_CHECKING:
    from forge_plugin_prometheus.prometheus import Prometheus

STATES = ("running", "finished", "stopped", "failed")
FORBIDDEN = re.compile(r"[^a-zA-Z0-9_]+")
PLACE = "prometheus.json"


COUNTERS = {"step": "forge_steps", "tokens": "forge_tokens"}
"""Numbers of lines that only grow while a run lasts, with their names, to which Prometheus' library adds `_total`."""


class GrownNumber(Collector):
    """A counter whose value is set: what has grown is counted elsewhere."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str]) -> None:
        self._name, self._text, self._labels, self.value = name, text, labels, 0.0

    def collect(self) -> Iterable[Metric]:
        """Yields the present value; called for each scrape, in a thread of the server, and for the textfile."""
        family = CounterMetricFamily(self._name, self._text, labels=[*self._labels])
        family.add_metric([*self._labels.values()], self.value)
        yield family


class PrometheusLogger:
    """See `forge_core.contracts.runtime.Logger`."""

    def __init__(self, component: Prometheus, run: str, folder: Path) -> None:
        self._component, self._folder = component, folder
        self._labels = {"run": run, **component.labels}
        # Not the library's global one, which adds figures of the process and keeps gauges of an earlier run
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, GrownNumber] = {}
        self._names: dict[str, str] = {}
        self._server: tuple[WSGIServer, threading.Thread] | None = None

    def start(self, step: int) -> None:
        """Open the endpoint; a port or folder that cannot be used is an error before the first step."""
        self._count("step", step)
        self._set("forge_run_info", 1, "folder of the run", folder=str(self._folder.absolute()))
        self._state("running")
        component = self._component
        if component.host:
            try:
                self._server = start_http_server(component.port, component.host, self._registry)
            except OSError as error:
                where = f"{component.host}:{component.port}"
                advice = "set another port (0: any free one), or host"
                raise ForgeError(f"{where} cannot be listened on: {error.strerror or error}; {advice}") from error
            host, port = self._server[0].server_address[:2]
            # With port 0 the address is known from here on only
            (self._folder / PLACE).write_text(json.dumps({"url": f"http://{host!s}:{port}/metrics"}) + "\n")
        try:
            self._write()
        except OSError as error:
            message = f"the textfile {component.textfile} cannot be written: {error.strerror}; set textfile to a path"
            raise ForgeError(f"{message} in a folder that exists and is yours") from error

    def log(self, record: Mapping[str, Any]) -> None:
        """Sets a counter or a gauge for each number, three gauges for counts of a layer, and rewrites the textfile."""
        for name, value in record.items():
            if name in COUNTERS:
                self._count(name, value)
            elif isinstance(value, Real) and name != "time":
                self._set(self._gauge_name(name), float(value), f"`{name}` of the lines of metrics")
        self._set("forge_last_line_timestamp_seconds", record.get("time", time.time()), "when the newest line was made")
        for name, rows in record.get("counts", {}).items():
            for layer, values in rows.items():
                summary = {"min": min(values), "mean": sum(values) / len(values), "max": max(values)}
                for suffix, value in summary.items():
                    own = self._gauge_name(f"{name}_{suffix}")
                    self._set(own, value, f"{suffix} of what a layer counted: `{name}`", layer=str(layer))
        self._write()

    def end(self, code: int, reason: str) -> None:
        """The endpoint goes with the process; the state stays in the textfile."""
        state = {ExitCode.FINISHED: "finished", ExitCode.STOPPED: "stopped"}.get(ExitCode(code), "failed")
        self._state(state)
        self._write()

    def close(self) -> None:
        """Stops the endpoint and removes the file with its address; the textfile stays."""
        if self._server is not None:
            server, thread = self._server
            # First, as it waits for the loop that uses the socket
            server.shutdown()
            server.server_close()
            thread.join()
            (self._folder / PLACE).unlink(missing_ok=True)

    def _state(self, state: str) -> None:
        # All of them, so that the previous state becomes 0 instead of staying at 1
        for name in STATES:
            self._set("forge_run_state", name == state, "1 for the state in which the run is", state=name)

    def _gauge_name(self, name: str) -> str:
        """`forge_eval_loss` for `eval/loss`; of two names that would be one, the later has a number at its end."""
        if name not in self._names:
            plain = own = "forge_" + FORBIDDEN.sub("_", name).strip("_")
            number = 1
            while own in self._names.values():
                number += 1
                own = f"{plain}_{number}"
            self._names[name] = own
        return self._names[name]

    def _count(self, name: str, value: float) -> None:
        if name not in self._counters:
            text = f"`{name}` of the lines of metrics, which grows until the run starts again"
            self._counters[name] = GrownNumber(COUNTERS[name], text, self._labels)
            self._registry.register(self._counters[name])
        self._counters[name].value = float(value)

    def _set(self, name: str, value: float, text: str, **labels: str) -> None:
        if name not in self._gauges:
            # At its first value: lines alone show which numbers a run has
            self._gauges[name] = Gauge(name, text, [*self._labels, *labels], registry=self._registry)
        self._gauges[name].labels(**self._labels, **labels).set(value)

    def _write(self) -> None:
        if self._component.textfile:
            write_to_textfile(self._component.textfile, self._registry)  # by a rename: node_exporter sees it whole
