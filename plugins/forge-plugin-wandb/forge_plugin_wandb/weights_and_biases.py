"""The component `wandb`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import ge, gt

from forge_kit.tools.tracking import TrackerComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.runtime import Logger


@frozen(kw_only=True)
class Wandb(TrackerComponent):
    """Shows the run in Weights & Biases: numbers over `step`, counts as histograms, files, the job as its config.

    A run that continues is the same run there. W&B cannot go back, so that steps which are made again after a crash
    are there twice, distinguished by `attempt`. The run's files of W&B are in its folder `wandb`.
    """

    mode: Literal["online", "offline"] = "online"
    """`offline` keeps everything in the run folder, for `wandb sync` later."""
    entity: str = ""
    """User or team that owns the project; empty: the account's default."""
    group: str = ""
    """Group of the run, for example of the seeds of one configuration."""
    base_url: str = ""
    """Address of a server of one's own; empty: `WANDB_BASE_URL`, or wandb.ai."""
    counts_interval: int = field(default=100, validator=ge(0))
    """Steps between two histograms of what modules count; 0: none."""
    timeout_s: float = field(default=60, validator=gt(0))
    """Longest wait for the server, at the start, where it then is an error, and at the end, where it is a warning."""
    system: bool = False
    """Whether W&B records the use of CPU, GPU and network, too."""

    def build(self, context: BuildContext) -> Logger:
        from forge_plugin_wandb.logger import WandbLogger

        return WandbLogger(self, context)
