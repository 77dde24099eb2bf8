"""The layout: how many ranks along which mesh dimension. Pure arithmetic, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from attrs import frozen

MESH_DIMENSIONS = ("pp", "replicate", "shard", "cp", "tp")
"""Outermost first, so that the ranks of one tp group are neighbours."""
TOKEN_DIMENSIONS = ("replicate", "shard", "cp")
"""Dimensions along which ranks hold different tokens."""
SAMPLE_DIMENSIONS = ("replicate", "shard")
"""Dimensions along which ranks hold different sequences."""


@frozen(kw_only=True)
class Layout:
    """Degrees of every dimension; their product, `ep` left out, is the world size."""

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """Expert parallel: folded into shard x cp, multiplies nothing."""

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, name) for name in MESH_DIMENSIONS)

    @property
    def data_parallel(self) -> int:
        """Ranks that hold different sequences."""
        return self.replicate * self.shard

    @property
    def token_ranks(self) -> int:
        """Ranks that hold different tokens."""
        return self.data_parallel * self.cp

    def __str__(self) -> str:
        parts = [f"{name} {getattr(self, name)}" for name in (*MESH_DIMENSIONS, "ep") if getattr(self, name) > 1]
        return ", ".join(parts) or "one process"


def degrees_of(layout: Layout) -> Mapping[str, int]:
    """Mesh dimensions in order, with their sizes."""
    return {name: getattr(layout, name) for name in MESH_DIMENSIONS}
