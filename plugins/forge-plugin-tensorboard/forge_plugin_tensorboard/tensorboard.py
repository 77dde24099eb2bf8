"""The component `tensorboard`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from forge_core.components import LoggerComponent

if TYPE_CHECKING:
    from forge_core.context import BuildContext
    from forge_core.protocols import Logger


@frozen(kw_only=True)
class TensorBoard(LoggerComponent):
    """Writes every number of a run as a scalar into its folder: `tensorboard --logdir runs` compares runs.

    Numbers of training lines are under `train/` unless their name has a group of its own (`eval/loss`,
    `loss/source_0`).
    """

    folder: str = "tensorboard"
    """Where to write, relative to the run folder."""

    def build(self, context: BuildContext) -> Logger:
        from forge_plugin_tensorboard.writer import TensorBoardLogger

        assert context.folder is not None
        return TensorBoardLogger(context.folder / self.folder)
