"""Places of ranks along the dimensions of a mesh."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from forge_core.contracts.errors import ForgeError
from forge_kit.nn.mesh import coordinate
from forge_testing.refusals import naming


def test_a_dimension_that_no_mesh_has_is_named() -> None:
    mesh = SimpleNamespace(mesh_dim_names=("shard", "cp", "tp"), shape=(2, 3, 2))
    assert [coordinate(9, name, mesh) for name in ("shard", "cp", "tp", "shard_cp")] == [1, 1, 1, 4]
    for dimension in ("pp", "shard_pp"):
        with pytest.raises(ForgeError, match=naming(repr(dimension))):
            coordinate(9, dimension, mesh)
