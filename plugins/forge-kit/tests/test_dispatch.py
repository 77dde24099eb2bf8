"""Rows of a dispatch: copies of tokens, by group, and their sums."""

from __future__ import annotations

import pytest
import torch

from forge_kit.nn.dispatch import Dispatch
from forge_testing.refusals import naming

T, K, G, D = 17, 3, 5, 4
GENERATOR = torch.Generator().manual_seed(0)
CHOSEN = torch.rand(T, G, generator=GENERATOR).argsort(1)[:, :K]
SOME = CHOSEN.masked_fill(torch.rand(T, K, generator=GENERATOR) < 0.4, -1)
SOME[3] = -1  # a token that nobody takes
CASES = {
    "all choices": CHOSEN,
    "some left out": SOME,
    "none": torch.full_like(CHOSEN, -1),
    "one group, of several, by every choice": torch.full_like(CHOSEN, 3),
    "no tokens": CHOSEN[:0],
}


def dispatch_of(chosen):
    return Dispatch.to_groups(chosen, G, rows=int((chosen >= 0).sum()))


def tokens_of(chosen, width=D):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(len(chosen), width, dtype=torch.float64, generator=generator, requires_grad=True)


@pytest.mark.parametrize("chosen", CASES.values(), ids=CASES)
def test_rows_are_copies_of_tokens_group_by_group_in_the_order_of_tokens(chosen):
    tokens, dispatch = tokens_of(chosen), dispatch_of(chosen)
    expected = [token for group in range(G) for token, own in enumerate(chosen) for one in own if one == group]
    assert dispatch.sources.tolist() == expected
    assert dispatch.counts.tolist() == [int((chosen == group).sum()) for group in range(G)]
    assert torch.equal(dispatch.to_rows(tokens), tokens[expected])


@pytest.mark.parametrize("chosen", CASES.values(), ids=CASES)
def test_sums_are_of_each_tokens_rows_times_their_weights(chosen):
    tokens, weights, dispatch = tokens_of(chosen), tokens_of(chosen, K), dispatch_of(chosen)
    factors = torch.arange(1.0, G + 1, dtype=torch.float64)
    rows = dispatch.to_rows(tokens) * factors.repeat_interleave(dispatch.counts).unsqueeze(1)
    share = (weights * factors[chosen.clamp(min=0)]).where(chosen >= 0, 0).sum(1, keepdim=True)
    torch.testing.assert_close(dispatch.add_up(rows, weights), share * tokens)
    unweighted = factors[chosen.clamp(min=0)].where(chosen >= 0, 0).sum(1, keepdim=True)
    torch.testing.assert_close(dispatch.add_up(rows), unweighted * tokens)


@pytest.mark.parametrize("chosen", CASES.values(), ids=CASES)
def test_gradients(chosen):
    dispatch = dispatch_of(chosen)
    assert torch.autograd.gradcheck(
        lambda tokens, weights: dispatch.add_up(dispatch.to_rows(tokens).square(), weights),
        (tokens_of(chosen), tokens_of(chosen, K)),
    )
    assert torch.autograd.gradcheck(
        lambda tokens: dispatch.add_up(dispatch.to_rows(tokens).square()), tokens_of(chosen)
    )


@pytest.mark.parametrize("chosen", CASES.values(), ids=CASES)
def test_groups_that_are_filled_up_give_the_same(chosen):
    tokens, weights, plain = tokens_of(chosen), tokens_of(chosen, K), dispatch_of(chosen)
    filled = Dispatch.to_groups(chosen, G, rows=int((chosen >= 0).sum()), multiple=4)
    assert filled.counts.tolist() == [-(-count // 4) * 4 for count in plain.counts.tolist()]
    found = []
    for dispatch in (plain, filled):
        rows = dispatch.to_rows(tokens)
        y = dispatch.add_up(rows.square(), weights)
        gradients = torch.autograd.grad(y.square().sum(), (tokens, weights, rows))
        found.append((y, *gradients[:2]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    of_no_choice = filled.choices == chosen.numel()
    assert of_no_choice.sum() == (filled.counts - plain.counts).sum()
    assert not gradients[2][of_no_choice].any()
    if of_no_choice.any():
        with pytest.raises(ValueError, match=naming("weights")):
            filled.add_up(rows)


def test_weights_stay_wide_beside_narrow_rows():
    tokens = tokens_of(CHOSEN).detach().bfloat16().requires_grad_()
    weights = torch.rand(T, K, requires_grad=True)
    dispatch = dispatch_of(CHOSEN)
    y = dispatch.add_up(dispatch.to_rows(tokens), weights)
    y.backward(torch.ones_like(y))
    assert (y.dtype, tokens.grad.dtype, weights.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    torch.testing.assert_close(weights.grad, tokens.detach().float().sum(1, keepdim=True).expand(T, K))
