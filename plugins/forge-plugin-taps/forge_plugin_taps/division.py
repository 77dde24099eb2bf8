"""How a layout divides activations among ranks, by what its stages declare and not by the names of dimensions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from attrs import frozen

from forge_core.contracts.errors import Problem
from forge_core.contracts.layout import DIMENSIONS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from forge_core.contracts.layout import Layout
    from forge_core.job import Job

FEATURES = frozenset({"heads", "hidden"})
POSITIONS, REST = "positions", "rest"
KNOWN = (*sorted(FEATURES), POSITIONS, REST)


@frozen
class Division:
    """What the ranks that have the same sequences divide. A dimension is empty where there is none of its sort."""

    features: str = ""
    """Dimension that divides heads or hidden features."""
    axes: frozenset[str] = frozenset()
    """What it divides, `rest` included."""
    positions: str = ""
    """Dimension whose ranks have different positions of each sequence, given by the entry `places` of batches."""
    equal: tuple[str, ...] = ()
    """Dimensions whose ranks all have the same values."""

    @classmethod
    def of(cls, job: Job, layout: Layout) -> Division:
        """Returns the division of a job without `division_problems`."""
        declared = _declared(job, layout)
        # At most one divides features, as `division_problems` refuses jobs with more
        features = next((name for name, axes in declared.items() if FEATURES & axes), "")
        return cls(
            features,
            declared.get(features, frozenset()),
            next((name for name, axes in declared.items() if POSITIONS in axes), ""),
            tuple(name for name, axes in declared.items() if not axes),
        )

    @property
    def at_rest(self) -> bool:
        """Whether ranks that share features divide positions between blocks (sequence parallel)."""
        return REST in self.axes


def place_along(dimension: str, mesh: DeviceMesh | None) -> tuple[int, int]:
    """Returns (this rank's number, ranks) along a dimension; (0, 1) without one."""
    if not dimension or mesh is None:
        return 0, 1
    names = mesh.mesh_dim_names or ()
    return mesh.get_local_rank(dimension), mesh.size(names.index(dimension))


def group_along(dimension: str, mesh: DeviceMesh | None) -> ProcessGroup | None:
    """Returns this rank's group along a dimension; None without one."""
    return mesh.get_group(dimension) if dimension and mesh is not None else None


def shares_tokens(layout: Layout) -> bool:
    """Returns whether several ranks compute the same tokens, so that they may have parts of features or of sums."""
    # Not by the name `tp`: a plugin may bring dimensions that divide features, too
    return any(size > 1 and not dimension.divides_tokens and not dimension.layers for dimension, size in layout.sizes)


def division_problems(job: Job, layout: Layout) -> Iterator[Problem]:
    """Yields why it is not known which part of activations a rank of this job has."""
    declared = _declared(job, layout)
    for name in _shared(layout):
        if name not in declared:
            message = (
                f"ranks of the dimension {name} have the same sequences, and no stage defines which part of activations"
            )
            yield Problem("", f"{message} each has; return it in `divided_axes()` of the stage, or leave taps out")
    of_tokens = {dimension.name for dimension, _ in layout.sizes if dimension.tokens}
    for name, axes in declared.items():
        if unknown := sorted(axes - {*KNOWN}):
            message = f"the dimension {name} divides {unknown[0]!r}, which taps do not know"
            yield Problem("", f"{message}; there are {', '.join(KNOWN)}")
        elif POSITIONS not in axes and name in of_tokens:
            message = f"ranks of the dimension {name} have other tokens, and its stage does not say that it divides"
            yield Problem("", f"{message} {POSITIONS}; return them in `divided_axes()`")
    for what, wanted in (("features", FEATURES), (POSITIONS, frozenset({POSITIONS}))):
        if len(names := [name for name, axes in declared.items() if axes & wanted]) > 1:
            yield Problem("", f"both {names[0]} and {names[1]} divide {what}, of which taps know one dimension")
    yield from _order_problems(job, layout)


def _order_problems(job: Job, layout: Layout) -> Iterator[Problem]:
    # The order of stages for these is known: see `Taps.after`
    usual = {dimension.name for dimension in DIMENSIONS}
    for name, stage in job.parallel.items():
        own = [
            dimension for dimension in stage.divided_axes() if dimension not in usual and layout.degree(dimension) > 1
        ]
        if own and "taps" not in {**stage.before, **stage.after}:
            message = f"parallel.{name} divides activations, and does not say whether taps see what it leaves"
            yield Problem("", f'{message}; give it before = {{"taps": "…"}}')


def _shared(layout: Layout) -> list[str]:
    """Dimensions whose ranks have the same sequences and layers."""
    return [d.name for d, size in layout.sizes if size > 1 and not d.samples and not d.layers]


def _declared(job: Job, layout: Layout) -> Mapping[str, frozenset[str]]:
    """What ranks divide, by dimension, of those in this layout."""
    axes: dict[str, Collection[str]] = {}
    for stage in job.parallel.values():
        axes |= stage.divided_axes()
    return {name: frozenset(axes[name]) for name in _shared(layout) if name in axes}
