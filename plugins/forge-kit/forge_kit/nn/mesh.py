"""Arrangements of the run's ranks, and the place of a rank in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from forge_core.contracts.errors import ForgeError
from forge_core.parallel.mesh import dimensions_of, mesh_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ARRANGEMENTS = "forge_arrangements"
"""Attribute of the run's mesh: the meshes that `arrange` made of its ranks."""


def arrange(mesh: DeviceMesh, sizes: Mapping[str, int]) -> DeviceMesh:
    """The ranks of the run's mesh in another arrangement, for a stage that groups them its own way. Collective.

    Parameters may be split over its dimensions, which `coordinate` accepts from then on.

    Args:
        mesh: the run's mesh (`context.mesh`).
        sizes: ranks by name, outermost first, for all ranks of the run. A name that `mesh` has too must mean the same.
    """
    other = mesh_of(sizes, mesh.device_type)
    # On the run's mesh, so that arrangements end with the run
    vars(mesh).setdefault(ARRANGEMENTS, []).append(other)
    return other


def coordinate(rank: int, dimension: str, mesh: DeviceMesh) -> int:
    """The place of a global rank along a dimension of the run's mesh or of another arrangement (`arrange`).

    Dimensions that were flattened into one are joined by `_`: `shard_cp`.

    Raises:
        ForgeError: there is no such dimension.
    """
    parts = dimension.split("_")
    arrangements: list[DeviceMesh] = [mesh, *vars(mesh).get(ARRANGEMENTS, ())]
    for arrangement in arrangements:
        names = arrangement.mesh_dim_names or ()
        if set(parts) <= set(names):
            place, number = place_of(rank, arrangement), 0
            for part in parts:
                # The first of the joined dimensions is the outermost, as in a flattened mesh
                number = number * arrangement.shape[names.index(part)] + place[part]
            return number
    raise ForgeError(f"no mesh of this run has the dimension {dimension!r}; make one by `forge_kit.nn.mesh.arrange`")


def place_of(rank: int, mesh: DeviceMesh) -> dict[str, int]:
    """Coordinates of a global rank: ranks are arranged row by row."""
    return dict(zip(mesh.mesh_dim_names or (), map(int, np.unravel_index(rank, mesh.shape)), strict=True))


def layer_dimensions(mesh: DeviceMesh) -> set[str]:
    """Names of the dimensions whose ranks hold different layers."""
    return {name for name, dimension in dimensions_of(mesh).items() if dimension.layers}
