"""What `cp` puts in the place of attention takes values narrower than keys."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from forge_plugin_parallel.cp_stage import Exchange, Gathered, Ring, places
from forge_testing.processes import run_on_ranks

RANKS, ROWS, LENGTH, HEADS, GROUPS, KEYS, VALUES = 2, 2, 8, 4, 2, 6, 5


class Whole(torch.nn.Module):
    """Causal attention over all positions."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: object) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


MIXERS = {"ring": Ring, "all_gather": Gathered, "ulysses": lambda group: Exchange(Whole(), group)}


def inputs() -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values of all positions, and a gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    widths = ((HEADS, KEYS), (GROUPS, KEYS), (GROUPS, VALUES), (HEADS, VALUES))
    *tensors, grad = (torch.randn(ROWS, LENGTH, *w, dtype=torch.float64, generator=generator) for w in widths)
    return [tensor.requires_grad_() for tensor in tensors], grad


@pytest.mark.parametrize("method", MIXERS)
def test_forward_and_backward_equal_those_of_one_rank(method: str) -> None:
    tensors, grad = inputs()
    expected = Whole()(*tensors, {})
    wanted = [expected, *torch.autograd.grad(expected, tensors, grad)]

    def part(rank: int) -> list[Tensor]:
        own = places(RANKS, LENGTH, method != "ulysses", torch.device("cpu"))[rank]
        mine = [tensor.detach()[:, own].requires_grad_() for tensor in tensors]
        out = MIXERS[method](dist.group.WORLD)(*mine, {"positions": own.expand(ROWS, -1)})
        return [tensor.detach() for tensor in (out, *torch.autograd.grad(out, mine, grad[:, own]))]

    parts = run_on_ranks(RANKS, part)
    order = places(RANKS, LENGTH, method != "ulysses", torch.device("cpu")).flatten()
    for name, whole, *found in zip(("out", "q", "k", "v"), wanted, *parts, strict=True):
        torch.testing.assert_close(torch.cat(found, 1), whole[:, order], msg=lambda text, name=name: f"{name}: {text}")
