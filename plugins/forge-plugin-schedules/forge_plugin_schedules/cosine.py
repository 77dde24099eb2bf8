"""The component `cosine`."""

from __future__ import annotations

import math

from attrs import frozen

from forge_kit.schedules import DecayComponent


@frozen(kw_only=True)
class Cosine(DecayComponent):
    """Half a cosine from the base rate down to the floor (Loshchilov and Hutter 2017, without restarts)."""

    def shape(self, progress: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * progress))
