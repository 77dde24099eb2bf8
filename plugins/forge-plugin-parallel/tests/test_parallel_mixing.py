"""Windows, masks, scales, caps and sinks over the positions of several ranks: as on one rank, gradients included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from forge_core.contracts.layout import Layout
from forge_plugin_parallel import ContextParallel, ring
from forge_plugin_parallel.cp_stage import WHOLE, Exchange, Gathered, Ring, rank_positions
from forge_plugin_parallel.ring import Mixing, _Block
from forge_plugin_transformer import BidirectionalMask, ChunkedMask, GlobalLocalMask
from forge_plugin_transformer.attention_backends import Choice
from forge_plugin_transformer.document_backends import DocumentChoice
from forge_plugin_transformer.modules.attention_core import AttentionCore
from forge_plugin_transformer.modules.masks import MaskedCore
from forge_plugin_transformer.scoring import Scoring
from forge_testing.processes import run_on_ranks
from forge_testing.tiny_model import TinyNetwork

RANKS, ROWS, LENGTH, HEADS, GROUPS, WIDTH, VALUES = 2, 2, 16, 4, 2, 6, 4
METHODS = ("ring", "all_gather", "ulysses")
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "window of one": {"window": 1},
    "window": {"window": 3},
    "window of more than a chunk": {"window": 7, "scale": 0.3},
    "sinks": {"sinks": True},
    "window and sinks": {"window": 5, "sinks": True, "scale": 0.7},
    "everything": {"window": 6, "sinks": True, "scale": 0.7, "soft_cap": 1.5},
    "chunks": {"mask": ChunkedMask(chunk_size=5)},
    "global and local, sinks": {"mask": GlobalLocalMask(window=2, global_positions=1), "sinks": True},
    "both ways": {"mask": BidirectionalMask()},
}
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 9, [0] * 3 + [1] * 2 + [2] * 11])


def one(scoring: Scoring) -> AttentionCore:
    core = AttentionCore if scoring.mask is None else MaskedCore
    return core(Choice("math", ""), DocumentChoice("mask", ""), scoring)


def mixer(method: str, options: Mapping[str, Any]) -> torch.nn.Module:
    if method == "ulysses":
        return Exchange(one(Scoring(**options)), dist.group.WORLD)
    return (Ring if method == "ring" else Gathered)(dist.group.WORLD, Mixing(**options))


def inputs() -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, VALUES), (HEADS, VALUES)  # values are narrower than keys
    shapes = [(ROWS, LENGTH, *size) for size in sizes] + [(HEADS,)]
    *tensors, grad, sinks = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return [tensor.requires_grad_() for tensor in (*tensors, sinks)], grad


def entries(own: Tensor, documents: bool) -> dict[str, Tensor]:
    batch = {"positions": own.expand(ROWS, -1)}
    return batch | ({"document_ids": DOCUMENTS[:, own], WHOLE + "document_ids": DOCUMENTS} if documents else {})


CASES = [
    (method, name, documents)
    for method in METHODS
    for name in OPTIONS
    for documents in (False, True)
    if method == "ulysses" or name != "both ways"
]


@pytest.mark.parametrize("scores", [ring.SCORES, 150], ids=["whole blocks", "parts of two to four rows"])
def test_forward_and_backward_equal_those_of_one_rank(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cases in the same processes."""
    monkeypatch.setattr(ring, "SCORES", scores)
    largest, computed = [0], _Block.scores

    def noted(block: _Block) -> Tensor:
        found = computed(block)
        largest[0] = max(largest[0], found.numel())
        return found

    monkeypatch.setattr(_Block, "scores", noted)
    cases = [case for case in CASES if scores > 150 or case[0] == "ring"]

    def part(rank: int) -> list[list[Tensor]]:
        found = []
        for method, name, documents in cases:
            (*tensors, sinks), grad = inputs()
            own = rank_positions(RANKS, LENGTH, method != "ulysses", torch.device("cpu"))[rank]
            mine = [tensor.detach()[:, own].requires_grad_() for tensor in tensors]
            given = [sinks] if OPTIONS[name].get("sinks") else []
            out = mixer(method, OPTIONS[name])(*mine, entries(own, documents), *given)
            found.append([t.detach() for t in (out, *torch.autograd.grad(out, [*mine, *given], grad[:, own]))])
        assert 0 < largest[0] <= scores
        return found

    parts = run_on_ranks(RANKS, part)
    for (method, name, documents), *found in zip(cases, *parts, strict=True):
        (*tensors, sinks), grad = inputs()
        given = [sinks] if OPTIONS[name].get("sinks") else []
        expected = one(Scoring(**OPTIONS[name]))(*tensors, {"document_ids": DOCUMENTS} if documents else {}, *given)
        wanted = [expected, *torch.autograd.grad(expected, [*tensors, *given], grad)]
        order = rank_positions(RANKS, LENGTH, method != "ulysses", torch.device("cpu")).flatten()
        for key, whole, *pieces in zip(("out", "q", "k", "v", "sinks"), wanted, *found, strict=False):
            place = f"{method}, {name}, documents {documents}: {key}"
            joined, whole = (sum(pieces), whole) if key == "sinks" else (torch.cat(pieces, 1), whole[:, order])
            torch.testing.assert_close(joined, whole, msg=lambda text, place=place: f"{place}: {text}")


@pytest.mark.parametrize(("window", "turns"), [(1, [1] * 4), (2, [2, 3, 3, 2]), (4, [3, 4, 4, 3]), (0, [4] * 4)])
def test_a_ring_computes_no_block_outside_of_all_windows(window: int, turns: list[int]) -> None:
    """Ranks have the chunks 0 and 7, 1 and 6, 2 and 5, 3 and 4, of two positions each."""
    ranks, computed = 4, _Block.forward
    (*tensors, sinks), grad = inputs()
    order = rank_positions(ranks, LENGTH, True, torch.device("cpu"))

    def part(rank: int) -> tuple[list[Tensor], int]:
        blocks: list[_Block] = []
        _Block.forward = lambda block: (blocks.append(block), computed(block))[1]  # in this process alone
        mine = [tensor.detach()[:, order[rank]].requires_grad_() for tensor in tensors]
        ring = Ring(dist.group.WORLD, Mixing(window=window, sinks=True))
        out = ring(*mine, {"positions": order[rank].expand(ROWS, -1)}, sinks.detach())
        return [t.detach() for t in (out, *torch.autograd.grad(out, mine, grad[:, order[rank]]))], len(blocks)

    found, counts = zip(*run_on_ranks(ranks, part), strict=True)
    expected = one(Scoring(window=window, sinks=True))(*tensors, {}, sinks)
    wanted = [expected, *torch.autograd.grad(expected, tensors, grad)]
    for whole, *pieces in zip(wanted, *found, strict=True):
        torch.testing.assert_close(torch.cat(pieces, 1), whole[:, order.flatten()])
    assert list(counts) == turns


class Strange(torch.nn.Module):
    """A mixer that does what no stage knows of."""

    def mixing(self) -> dict[str, float]:
        return {"window": 4, "decay": 0.5}


class StrangeNetwork(TinyNetwork):
    def sequence_mixers(self) -> dict[str, int]:
        return {f"layers.{name}.mixer": 2 for name in self.layers}


@pytest.mark.parametrize("what", ["decay", "bidirectional_mask"])
@pytest.mark.parametrize(("method", "count"), [("ring", 1), ("all_gather", 1), ("ulysses", 0)])
def test_what_a_method_does_not_compute_is_refused_by_name(method: Any, count: int, what: str) -> None:
    model = StrangeNetwork(4, 2, 0.0, 8, torch.float32)
    for layer in model.layers.values():
        layer.mixer = Strange() if what == "decay" else one(Scoring(mask=BidirectionalMask()))
    problems = list(ContextParallel(degree=2, method=method).model_problems(model, Layout(cp=2)))
    message = f"{method} does not compute {what}, which layers.0.mixer declares"
    expected = f'{message}; take "ulysses", or leave the stage out'
    assert [(p.path, p.message) for p in problems] == [("method", expected)] * count
