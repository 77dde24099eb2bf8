"""The layout: how many ranks along which mesh dimension. Pure arithmetic, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import methodcaller

from attrs import field, frozen
from attrs.validators import matches_re


@frozen
class MeshDimension:
    """A dimension of the mesh of ranks, as a stage declares it (`ParallelComponent.dimensions`)."""

    # The engine goes by the flags and not by names, so that a dimension of a third party is as good as the usual ones:
    # which ranks read the same samples, are summed over, and draw the same random numbers.
    name: str = field(validator=matches_re(r"[a-z][a-z0-9]*"))  # no "_", which joins the names of flattened dimensions
    tokens: bool = field(default=False, kw_only=True)
    """Whether its ranks hold different tokens, so that gradients are summed over them."""
    samples: bool = field(default=False, kw_only=True)
    """Whether its ranks read different sequences; they then hold different tokens too."""
    layers: bool = field(default=False, kw_only=True)
    """Whether its ranks hold different layers (a pipeline)."""
    order: int = field(default=50, kw_only=True)
    """Place among the dimensions, the smallest outermost: pp 0, replicate 10, shard 20, cp 30, tp 40."""

    @property
    def divides_tokens(self) -> bool:
        """Whether its ranks hold different tokens: other sequences, or other positions of the same ones."""
        return self.tokens or self.samples


# Ranks of the innermost dimension are neighbours. The more often ranks of a dimension communicate, the further inside
# it is, so that they share a node: tp for each matrix, cp in attention, shard for each layer, replicate once a step; pp
# sends the least, activations from one stage to the next.
DIMENSIONS = (
    MeshDimension("pp", layers=True, order=0),
    MeshDimension("replicate", samples=True, order=10),
    MeshDimension("shard", samples=True, order=20),
    MeshDimension("cp", tokens=True, order=30),
    MeshDimension("tp", order=40),
)
"""The usual dimensions, part of every layout: a stage may ask for ranks along them without declaring them."""


@frozen(init=False)
class Layout:
    """Ranks along each mesh dimension, 1 where left out; their product is the world size.

    Layout(shard=4, tp=2)
    Layout([MeshDimension("branch", order=45)], branch=2)  # a dimension in addition to the usual ones
    """

    sizes: tuple[tuple[MeshDimension, int], ...]
    """Every dimension with its ranks, outermost first."""
    run: tuple[int, int] = (0, 1)
    """(number, count): this run among those that train one model, see `ParallelComponent.part_of_batch`."""

    def __init__(self, further: Iterable[MeshDimension] = (), *, run: tuple[int, int] = (0, 1), **degrees: int) -> None:
        known = {dimension.name: dimension for dimension in (*DIMENSIONS, *further)}
        if unknown := degrees.keys() - known.keys():
            raise ValueError(f"no mesh dimension {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        ordered = sorted(known.values(), key=lambda dimension: dimension.order)
        self.__attrs_init__(tuple((dimension, degrees.get(dimension.name, 1)) for dimension in ordered), run)

    @property
    def degrees(self) -> Mapping[str, int]:
        """Ranks by dimension, outermost first."""
        return {dimension.name: size for dimension, size in self.sizes}

    def degree(self, name: str) -> int:
        """Returns the ranks along a dimension; 1 where no stage of the job has it."""
        return self.degrees.get(name, 1)

    # The usual dimensions by name: `layout.tp` is `layout.degree("tp")`.
    pp, replicate, shard, cp, tp = (property(methodcaller("degree", dimension.name)) for dimension in DIMENSIONS)

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees.values())

    @property
    def data_parallel(self) -> int:
        """Ranks that hold different sequences."""
        return math.prod(size for dimension, size in self.sizes if dimension.samples)

    @property
    def token_ranks(self) -> int:
        """Ranks that hold different tokens."""
        return math.prod(size for dimension, size in self.sizes if dimension.divides_tokens)

    def __str__(self) -> str:
        return ", ".join(f"{name} {size}" for name, size in self.degrees.items() if size > 1) or "one process"
