"""MoMa (arXiv 2407.21770) from its equations, with loops over sequences, positions and experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = Mapping[str, Tensor]
"""Parameters of a `moe` layer, by their names in it."""


def experts_of(modality: int, groups: Mapping[str, int]) -> range:
    """Experts of the modality of an id: text from 0, -1 an image, -2 a video, -3 sound."""
    wanted = ("text", "sound", "video", "image")[modality] if modality < 0 else "text"
    start = 0
    for name, size in groups.items():
        if name == wanted:
            return range(start, start + size)
        start += size
    return range(0)


def scores(weights: Weights, x: Tensor, noise: Tensor | None = None) -> Tensor:
    """(B, S, E): the sigmoid of equations 1 and, with noise, 5."""
    logits = x @ weights["router.weight"].T
    return torch.sigmoid(logits if noise is None else logits + noise)


def by_tokens(gates: Tensor, ids: Tensor, groups: Mapping[str, int], top_k: int) -> Tensor:
    """(B, S, E), bool: each position's experts of its group with the largest scores."""
    taken = torch.zeros_like(gates, dtype=torch.bool)
    for row, position in _positions(ids):
        own = sorted(experts_of(int(ids[row, position]), groups), key=lambda e: -gates[row, position, e].item())
        taken[row, position, own[:top_k]] = True
    return taken


def by_experts(gates: Tensor, ids: Tensor, groups: Mapping[str, int], factor: float) -> Tensor:
    """(B, S, E), bool: section 2.2, k_e = b_M c_e, with b_M counted in a sequence and rounded up."""
    taken = torch.zeros_like(gates, dtype=torch.bool)
    for row, own in enumerate(ids):
        for expert in range(gates.shape[-1]):
            members = [s for s, number in enumerate(own) if expert in experts_of(int(number), groups)]
            if members:
                size = len(experts_of(int(own[members[0]]), groups))
                best = sorted(members, key=lambda s: -gates[row, s, expert].item())
                taken[row, best[: math.ceil(factor * len(members) / size)], expert] = True
    return taken


def auxiliary(weights: Weights, x: Tensor, ids: Tensor, groups: Mapping[str, int]) -> Tensor:
    """(B, S, E): equation 3, and 0 for experts of other groups."""
    predicted = []
    for name in groups:
        up, down = (weights[f"router.auxiliary_routers.{name}.{part}.weight"] for part in ("up", "down"))
        predicted.append(torch.sigmoid(F.silu(x @ up.T) @ down.T))
    own = torch.zeros(*ids.shape, sum(groups.values()), dtype=torch.bool)
    for row, position in _positions(ids):
        own[row, position, list(experts_of(int(ids[row, position]), groups))] = True
    return torch.cat(predicted, -1).where(own, 0)


def output(weights: Weights, x: Tensor, gates: Tensor, taken: Tensor) -> Tensor:
    """(B, S, D): equation 1."""
    y = torch.zeros_like(x)
    for expert in range(gates.shape[-1]):
        gate, up, down = (weights[f"experts.{name}.weight"][expert] for name in ("gate", "up", "down"))
        hidden = F.silu(x @ gate.T) * (x @ up.T) @ down.T
        y = y + (gates[..., expert] * taken[..., expert])[..., None] * hidden
    return y


def _positions(ids: Tensor) -> Iterator[tuple[int, int]]:
    return ((row, position) for row in range(ids.shape[0]) for position in range(ids.shape[1]))
