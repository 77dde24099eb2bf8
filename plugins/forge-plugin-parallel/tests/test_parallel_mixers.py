"""Attention as `cp` replaces it takes values narrower than keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from forge_core.contracts.layout import Layout
from forge_core.contracts.model import with_defaults
from forge_core.parallel.mesh import make_mesh
from forge_plugin_parallel import ContextParallel
from forge_plugin_parallel.cp_stage import WHOLE, ContextParallelStage, Exchange, Gathered, Ring, rank_positions
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, naming
from forge_testing.tiny_model import TinyNetwork

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
        own = rank_positions(RANKS, LENGTH, method != "ulysses", torch.device("cpu"))[rank]
        mine = [tensor.detach()[:, own].requires_grad_() for tensor in tensors]
        out = MIXERS[method](dist.group.WORLD)(*mine, {"positions": own.expand(ROWS, -1)})
        return [tensor.detach() for tensor in (out, *torch.autograd.grad(out, mine, grad[:, own]))]

    parts = run_on_ranks(RANKS, part)
    order = rank_positions(RANKS, LENGTH, method != "ulysses", torch.device("cpu")).flatten()
    for name, whole, *found in zip(("out", "q", "k", "v"), wanted, *parts, strict=True):
        torch.testing.assert_close(torch.cat(found, 1), whole[:, order], msg=lambda text, name=name: f"{name}: {text}")


class Model(torch.nn.Module):
    def sequence_mixers(self) -> dict[str, int]:
        return {}


class Declaring(Model):
    def sequence_entries(self) -> list[str]:
        return ["ahead"]


class Preparing(Model):
    def prepare_sequences(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch


def split_shapes(model: Model, rows: int = 3) -> list[dict[str, tuple[int, ...]]]:
    """Shapes of each rank's part of a batch of `LENGTH` positions, with patches that happen to be as many."""
    tokens = torch.arange(rows * LENGTH).view(rows, LENGTH)
    batch = {"input_ids": tokens, "labels": tokens, "document_ids": tokens, "sources": tokens[:, 0]}
    batch |= {"ahead": tokens.unsqueeze(-1), "patches": torch.zeros(rows, LENGTH, 2, 2)}

    def part(rank: int) -> dict[str, tuple[int, ...]]:
        layout = Layout(cp=2)
        context: Any = SimpleNamespace(layout=layout, mesh=make_mesh(layout, torch.device("cpu")))
        stage = ContextParallelStage(ContextParallel(degree=2), context)
        stage.apply(with_defaults(model))
        return {name: tuple(value.shape) for name, value in stage.split(batch).items()}

    return run_on_ranks(RANKS, part)


def test_only_entries_that_the_model_names_are_divided() -> None:
    half, whole = (3, LENGTH // 2), (3, LENGTH)
    for shapes in split_shapes(Declaring()):
        assert shapes["input_ids"] == shapes["labels"] == shapes["document_ids"] == shapes["positions"] == half
        assert (shapes["ahead"], shapes["sources"]) == ((*half, 1), (3,))
        assert shapes["patches"] == (*whole, 2, 2)


def test_an_entry_that_may_have_positions_is_refused_where_the_model_does_not_say() -> None:
    with pytest.raises(AssertionError, match=naming("parallel.cp", "'ahead'", "(3, 8, 1)", 8)):
        split_shapes(Model())


def test_a_model_that_prepares_sequences_and_does_not_say_has_them_divided_by_shape() -> None:
    assert all(shapes["ahead"] == (3, LENGTH // 2, 1) for shapes in split_shapes(Preparing()))


DOCUMENTS = torch.tensor([[0, 0, 1, 1, 0, 0, 0, 2], [3, 3, 3, 3, 5, 3, 3, 3]])
"""(ROWS, LENGTH): an id that comes back is another document."""


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_a_document_whose_id_comes_back_does_not_see_the_first_of_that_id(method: str) -> None:
    (q, k, v), _ = inputs()
    number = F.pad((DOCUMENTS[:, 1:] != DOCUMENTS[:, :-1]).cumsum(1), (1, 0))
    mask = (number[:, :, None] == number[:, None, :]).tril().unsqueeze(1)
    q_, k_, v_ = (tensor.detach().transpose(1, 2) for tensor in (q, k, v))
    expected = F.scaled_dot_product_attention(q_, k_, v_, mask, enable_gqa=True).transpose(1, 2)

    def part(rank: int) -> Tensor:
        own = rank_positions(RANKS, LENGTH, True, torch.device("cpu"))[rank]
        batch = {"positions": own.expand(ROWS, -1), f"{WHOLE}document_ids": DOCUMENTS}
        return MIXERS[method](dist.group.WORLD)(*(tensor.detach()[:, own] for tensor in (q, k, v)), batch)

    order = rank_positions(RANKS, LENGTH, True, torch.device("cpu")).flatten()
    torch.testing.assert_close(torch.cat(run_on_ranks(RANKS, part), 1), expected[:, order])


class Seeing(TinyNetwork):
    """Its layers are mixers; blocks of its encoder have no positions, and one after the last layer has."""

    def sequence_mixers(self) -> dict[str, int]:
        return {f"layers.{name}": 1 for name in self.layers}

    def ends(self) -> tuple[list[str], list[str]]:
        return ["embedding", "encoder"], ["norm", "head"]

    def further_blocks(self) -> list[str]:
        return ["encoder.0", *self.at_the_end]

    at_the_end: tuple[str, ...] = ()


def test_blocks_that_embed_runs_need_no_mixer_and_those_of_finish_do() -> None:
    model, layout = Seeing(4, 1, 0.0, 8, torch.float32), Layout(cp=2)
    assert list(ContextParallel(degree=2).model_problems(model, layout)) == []
    model.at_the_end = ("predictions.0",)
    problems = ContextParallel(degree=2).model_problems(model, layout)
    check_problems(problems, at("", "predictions.0"))
