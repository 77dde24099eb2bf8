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
    """Every number of every line as a TensorBoard scalar, in the folder `tensorboard` of the run.

    Training numbers are under `train/`; those that name a group themselves (`eval/loss`) keep it. What layers count,
    such as the tokens of their experts, becomes pictures: a row of squares a layer.
    """

    picture_interval: int = field(default=100, validator=gt(0))
    """Steps from picture to picture."""

    def build(self, context: BuildContext) -> Logger:
        from forge_plugin_tensorboard.writer import TensorBoardLogger

        assert context.folder is not None
        return TensorBoardLogger(context.folder / "tensorboard", self.picture_interval)
