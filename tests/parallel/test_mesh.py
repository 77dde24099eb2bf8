"""What ranks agree on."""

from __future__ import annotations

import pytest

from forge_core.parallel import mesh
from forge_testing.processes import run_on_ranks


@pytest.mark.parametrize("ring_up_to", [1, 64], ids=["dissemination", "ring"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_flag_of_any_rank_reaches_all(monkeypatch, size, ring_up_to):
    monkeypatch.setattr(mesh, "RING_UP_TO", ring_up_to)

    def agree(rank):
        return [mesh.any_rank([rank == setter, False, True]) for setter in range(size)]

    assert run_on_ranks(size, agree) == [[[True, False, True]] * size] * size
