"""The component `none`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from forge_core.contracts.components import SchedulerComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.optimizer import Schedule


@frozen(kw_only=True)
class NoSchedule(SchedulerComponent):
    """The base rate from the first update to the last, for optimizers that schedule themselves."""

    def build(self, context: BuildContext) -> Schedule:
        return lambda step, total: 1.0
