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


def test_the_largest_value_of_any_rank_is_known_to_all(monkeypatch):
    monkeypatch.setattr(mesh, "RING_UP_TO", 1)
    values = [[61.25, 1.0], [79.5, 0.0], [8.0, 0.5]]
    assert run_on_ranks(3, lambda rank: mesh.largest(values[rank])) == [[79.5, 1.0]] * 3
