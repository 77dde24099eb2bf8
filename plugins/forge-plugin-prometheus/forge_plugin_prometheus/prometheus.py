"""The component `prometheus`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, le

from forge_core.contracts.components import FilePath, LoggerComponent
from forge_core.contracts.errors import Problem

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.runtime import Logger
    from forge_core.job import Job

LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
OWN_LABELS = ("run", "layer", "state", "folder", "le", "quantile")


@frozen(kw_only=True)
class Prometheus(LoggerComponent):
    """Keeps the newest numbers of the run where Prometheus reads them: at `/metrics` of a port on rank 0, or in a file.

    Each number of a line is a gauge: `forge_loss`, `forge_eval_loss`, with characters that Prometheus does not allow
    as `_`, and a label `run`. `forge_steps_total` and `forge_tokens_total` are counters. With these,
    `forge_last_line_timestamp_seconds` and `forge_run_state` one sees how far the run is, whether it is silent, and how
    it ended. Of counts, there are smallest, mean and largest of each layer.
    """

    port: int = field(default=9400, validator=[ge(0), le(65535)])
    """Port of the endpoint; 0: any free one. Where it is stands in `prometheus.json` of the run folder."""
    host: str = "127.0.0.1"
    """Address on which the endpoint listens; `0.0.0.0` for a Prometheus on another machine. Empty: no endpoint."""
    textfile: FilePath = ""
    """File for the textfile collector of node_exporter, rewritten for each line; it must end in `.prom`."""
    labels: Mapping[str, str] = field(factory=dict)
    """Further labels of every number, for example `{ cluster = "a" }`."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that the numbers are shown somewhere, and names of the textfile and of labels."""
        if not self.host and not self.textfile:
            yield Problem("host", "neither an endpoint nor a textfile: set host, or textfile")
        if self.textfile and not self.textfile.endswith(".prom"):
            yield Problem("textfile", f"{self.textfile!r} must end in .prom, or node_exporter does not read it")
        elif self.textfile and _is_of_others(Path(self.textfile)):
            yield Problem(
                "textfile", f"{self.textfile!r} is of another program, and would be replaced; name another file"
            )
        for name in self.labels:
            if name in OWN_LABELS or not LABEL.fullmatch(name):
                own = f"; {', '.join(OWN_LABELS)} are taken"
                yield Problem(f"labels.{name}", f"{name!r} must be a word of letters, digits and _{own}")

    def build(self, context: BuildContext) -> Logger:
        """Imports Prometheus' library only here: a job is checked without it."""
        from forge_plugin_prometheus.exporter import PrometheusLogger

        assert context.folder is not None
        return PrometheusLogger(self, context.job.job.name, context.folder)


def _is_of_others(path: Path) -> bool:
    """Whether a file is there that this logger did not write."""
    try:
        return path.exists() and "forge_run_state" not in path.read_text(errors="replace")
    except OSError:  # a folder, or not readable: writing will say so
        return False
