"""The component `linear`."""

from __future__ import annotations

from attrs import frozen

from forge_kit.schedules import DecayComponent


@frozen(kw_only=True)
class Linear(DecayComponent):
    """A straight line from the base rate down to the floor."""

    def shape(self, progress: float) -> float:
        return 1 - progress
