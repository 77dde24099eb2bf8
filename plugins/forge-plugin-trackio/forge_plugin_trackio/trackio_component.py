"""The component `trackio`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import FilePath
from forge_core.contracts.errors import Problem
from forge_kit.tools.tracking import TrackerComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.runtime import Logger
    from forge_core.job import Job


@frozen(kw_only=True)
class Trackio(TrackerComponent):
    """Shows the run in trackio: numbers by step, counts as histograms, files, the job as its config.

    Its name there is `name` with an id, as trackio continues runs by name. Steps that are made again after a crash are
    there twice, distinguished by `attempt`. A run that stopped or failed has an alert with the reason.
    """

    folder: FilePath = ""
    """Where trackio keeps its SQLite files; empty: `TRACKIO_DIR`, or its own default in the user's cache."""
    server_url: str = ""
    """Address of a trackio server of one's own, with `?write_token=…` unless `TRACKIO_WRITE_TOKEN` is set."""
    space_id: str = ""
    """Space on Hugging Face, as `user/name`; it is made if it does not exist."""
    group: str = ""
    """Group of the run, for example of the seeds of one configuration."""
    counts_interval: int = field(default=100, validator=ge(0))
    """Steps between two histograms of what modules count; 0: none."""
    system: bool = False
    """Whether trackio records the use of CPU and GPU, too."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if self.server_url and self.space_id:
            yield Problem("space_id", "the run goes to one place: set server_url or space_id, not both")
        if self.server_url and not self.server_url.startswith(("http://", "https://")):
            yield Problem("server_url", f"{self.server_url!r} must begin with http:// or https://")

    def build(self, context: BuildContext) -> Logger:
        from forge_plugin_trackio.logger import TrackioLogger

        return TrackioLogger(self, context)
