"""The component `tensorboard`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import gt

from forge_core.contracts.components import LoggerComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.runtime import Logger


@frozen(kw_only=True)
class TensorBoard(LoggerComponent):
    """Writes every number of every line as a TensorBoard scalar, into the folder `tensorboard` of the run.

    Training numbers are under `train/`; names that already have a group (`eval/loss`) keep it. Counts of layers, such
    as tokens per expert, become pictures: one row of squares per layer.
    """

    picture_interval: int = field(default=100, validator=gt(0))
    """Steps between two pictures."""

    def build(self, context: BuildContext) -> Logger:
        from forge_plugin_tensorboard.writer import TensorBoardLogger

        assert context.folder is not None
        return TensorBoardLogger(context.folder / "tensorboard", self.picture_interval)
