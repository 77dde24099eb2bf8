"""`log_probabilities` against the plain formula in float64: values, gradients, ranks, and what it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from forge_core.contracts.model import VocabShard
from forge_kit.nn.modules import LinearHead
from forge_plugin_losses.log_probabilities import log_probabilities
from forge_testing.memory import peak_of
from forge_testing.processes import run_on_ranks

BATCH, SEQUENCE, DIM, VOCAB = 3, 7, 16, 50


class CappedHead(LinearHead):
    """Not linear: soft-capped logits, as in Gemma 2."""

    def logits(self, hidden: Tensor) -> Tensor:
        return 5 * torch.tanh(super().logits(hidden) / 5)


HEADS = {
    "linear": lambda: LinearHead(DIM, VOCAB),
    "linear with bias": lambda: LinearHead(DIM, VOCAB, bias=True),
    "capped": lambda: CappedHead(DIM, VOCAB),
    "capped with bias": lambda: CappedHead(DIM, VOCAB, bias=True),
}


def make(name: str = "linear", ignored: float = 0.3, dtype: torch.dtype = torch.float64) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(1)
    head = HEADS[name]().double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(BATCH, SEQUENCE, DIM, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (BATCH, SEQUENCE))
    return head, hidden, labels.masked_fill(torch.rand(BATCH, SEQUENCE) < ignored, -100)


def plain(head: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    with head.whole(hidden.dtype):
        logits = head.logits(hidden)
    valid = labels != -100
    return logits.log_softmax(-1).gather(-1, labels.where(valid, 0)[..., None])[..., 0].where(valid, 0)


def objective(values: Tensor) -> Tensor:
    """Another gradient at each position, as in a loss over answers."""
    weights = torch.linspace(-1, 2, values.numel(), dtype=values.dtype).view_as(values)
    return (values * weights).sum(-1).sigmoid().square().sum()


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(("chunk", "ignored"), [(2, 0.3), (100, 0.3), (4, 0.0), (4, 1.0)])
def test_values_and_gradients_are_those_of_the_formula(name: str, chunk: int, ignored: float) -> None:
    head, hidden, labels = make(name, ignored)
    values, expected = log_probabilities(head, hidden, labels, chunk_tokens=chunk), plain(head, hidden, labels)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
    inputs = (hidden, *head.parameters())
    actual, wanted = (torch.autograd.grad(objective(each), inputs) for each in (values, expected))
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


def test_calls_that_share_memory_do_not_change_each_other() -> None:
    from forge_plugin_losses.workspace import Workspace

    head, hidden, labels = make()
    workspace, inputs = Workspace(), (hidden, *head.parameters())
    first = log_probabilities(head, hidden, labels, chunk_tokens=3, workspace=workspace)
    log_probabilities(head, hidden.detach() + 1, labels, chunk_tokens=5, workspace=workspace)
    actual = torch.autograd.grad(objective(first), inputs)
    torch.testing.assert_close(actual, torch.autograd.grad(objective(plain(head, hidden, labels)), inputs))


@pytest.mark.parametrize("frozen", ["head", "hidden"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    head, hidden, labels = make("capped with bias")
    parts = {"hidden": [hidden], "head": list(head.parameters())}
    for tensor in parts[frozen]:
        tensor.requires_grad_(False)
    [trained] = [part for name, part in parts.items() if name != frozen]
    actual = torch.autograd.grad(objective(log_probabilities(head, hidden, labels, chunk_tokens=4)), trained)
    torch.testing.assert_close(actual, torch.autograd.grad(objective(plain(head, hidden, labels)), trained))


def test_in_bfloat16_values_are_float32_and_close() -> None:
    head, hidden, labels = make(dtype=torch.bfloat16)
    head.float()
    values = log_probabilities(head, hidden, labels, chunk_tokens=4)
    assert values.dtype == torch.float32
    (gradient,) = torch.autograd.grad(objective(values), hidden)
    wide = hidden.detach().double().requires_grad_()
    head.weight.data = head.weight.data.bfloat16().double()
    expected = plain(head.double(), wide, labels)
    torch.testing.assert_close(values.double(), expected, rtol=1e-2, atol=5e-2)
    (wanted,) = torch.autograd.grad(objective(expected), wide)
    assert (gradient.double() - wanted).norm() < 5e-2 * wanted.norm()


def test_without_gradients_the_values_are_the_same() -> None:
    head, hidden, labels = make()
    with torch.no_grad():
        values = log_probabilities(head, hidden, labels)
    assert not values.requires_grad
    assert torch.equal(values, log_probabilities(head, hidden, labels).detach())


def test_a_large_vocabulary_takes_less_than_0_6_of_the_plain_memory() -> None:
    torch.manual_seed(0)
    head = LinearHead(64, 32_000)
    torch.nn.init.normal_(head.weight, std=0.02)
    hidden, labels = torch.randn(2, 512, 64), torch.randint(0, 32_000, (2, 512))

    def peak(values: Any) -> int:
        leaf = hidden.clone().requires_grad_()
        head.weight.grad = None
        return peak_of(lambda: objective(values(head, leaf, labels)).backward())

    chunked, whole = peak(log_probabilities), peak(plain)
    assert chunked < 0.6 * whole, f"{chunked:,} of {whole:,} bytes"


def test_a_split_vocabulary_gives_the_same_and_each_rank_its_part_of_the_gradients() -> None:
    head, hidden, labels = make()
    expected = plain(head, hidden, labels)
    to_hidden, to_weight = torch.autograd.grad(objective(expected), (hidden, head.weight))
    parts = run_on_ranks(2, sharded)
    for part in parts:
        torch.testing.assert_close(part[0], expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parts[0][1] + parts[1][1], to_hidden, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), to_weight, rtol=1e-12, atol=1e-12)


def sharded(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    whole, hidden, labels = make()
    start, stop = [(0, 13), (13, VOCAB)][rank]
    head = LinearHead(DIM, stop - start).double()
    head.weight.data.copy_(whole.weight[start:stop])
    head.vocab_shard = VocabShard(dist.group.WORLD, start, stop - start)
    values = log_probabilities(head, hidden, labels, chunk_tokens=4)
    return values.detach(), *torch.autograd.grad(objective(values), (hidden, head.weight))
