"""Capacity: which choices of a sequence an expert accepts, against a loop over experts."""

from __future__ import annotations

import math

import pytest
import torch

from forge_plugin_moe.modules.capacity import within_capacity
from forge_plugin_moe.modules.sequences import Sequences

B, S, K, E = 3, 20, 2, 4


@pytest.mark.parametrize("factor", [0.01, 0.5, 1.0, 1.25, 10.0])
def test_an_expert_accepts_the_largest_weights_up_to_its_share_of_the_sequence(factor):
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(B, S, K, generator=generator)
    chosen = torch.rand(B, S, E, generator=generator).mul(torch.tensor([4.0, 2, 1, 1])).topk(K).indices
    chosen[0, :3] = -1  # no expert
    capacity = max(1, math.ceil(factor * S * K / E))
    expected = torch.zeros(B, S, K, dtype=torch.bool)
    for row in range(B):
        for expert in range(E):
            own = (chosen[row] == expert).nonzero().tolist()
            own.sort(key=lambda place: -weights[row, place[0], place[1]].item())
            for position, number in own[:capacity]:
                expected[row, position, number] = True
    accepted = within_capacity(weights, chosen, factor, E, Sequences(1, None), {})
    assert torch.equal(accepted, expected)
    assert bool((accepted != (chosen >= 0)).any()) == (factor < 10)
