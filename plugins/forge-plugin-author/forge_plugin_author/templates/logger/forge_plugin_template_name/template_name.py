"""The component template_name: its keys in a job file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import min_len

from forge_core import LoggerComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.runtime import Logger


@frozen(kw_only=True)
class TemplateName(LoggerComponent):
    """A table of comma-separated values in the run folder, a line for each step."""

    file: str = field(default="template_name.csv", validator=min_len(1))
    """Path of the table, relative to the run folder."""
    columns: tuple[str, ...] = field(default=("loss", "lr", "grad_norm"), validator=min_len(1))
    """Metrics beside the step. A number that a step does not have is left empty."""

    def build(self, context: BuildContext) -> Logger:
        from forge_plugin_template_name.table import Table

        assert context.folder is not None  # loggers are built for a run
        return Table(context.folder / self.file, self.columns)
