"""The storage template_name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import min_len

from forge_core import StorageComponent
from forge_core.checkpoint.storage import LocalStorage
from forge_core.contracts.components import FilePath

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.runtime import Storage


@frozen(kw_only=True)
class TemplateName(StorageComponent):
    """Stores checkpoints on another disk than the rest of the run: `{path}/{name of the run}/step-N`."""

    path: FilePath = field(validator=min_len(1))
    """A folder for the checkpoints of all runs, the same on every rank; `~` is the home folder."""

    def build(self, context: BuildContext) -> Storage:
        return LocalStorage(Path(self.path) / context.job.job.name)
