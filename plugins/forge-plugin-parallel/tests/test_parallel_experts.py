"""Stacks of experts that ranks share give what one process gives, and send no more than they must."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.layout import Layout
from forge_kit.nn.dispatch import Dispatched, ExpertRanks
from forge_plugin_parallel import AllGather, AllToAll, ExpertParallel, collectives
from forge_plugin_parallel.collectives import send_rows
from forge_plugin_parallel.ep_all_to_all import places_of_a_token
from forge_plugin_parallel.ep_exchange import Exchange, LocalExperts
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems

RANKS, EACH, D, K = 4, 2, 7, 3
EXPERTS = RANKS * EACH
ELEMENT = 8
"""Bytes of a float64."""


class Stack(nn.Module):
    """Wₑ² x of each expert e, computed for every token by every expert; an `ExpertStack`."""

    def __init__(self, first=0, last=EXPERTS):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        every = torch.randn(EXPERTS, D, D, generator=generator, dtype=torch.float64)
        self.weight = nn.Parameter(every[first:last].clone())

    def forward(self, tokens, weights, chosen, rows=None, overlap_fn=None):
        if overlap_fn is not None:
            overlap_fn()
        assert rows is None or rows == (chosen >= 0).sum()
        results = torch.einsum("edf,tf->ted", self.weight.square(), tokens)
        own = results.gather(1, chosen.clamp(min=0).unsqueeze(-1).expand(*chosen.shape, D))
        return (weights.where(chosen >= 0, 0).unsqueeze(-1) * own).sum(1)


def tokens_of(rank, case):
    """Tokens, weights and choices of a rank; each rank has another number, and the first none."""
    generator = torch.Generator().manual_seed(rank)
    count = 5 * rank
    chosen = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :K]
    if case == "some left out":
        chosen = chosen.masked_fill(torch.rand(count, K, generator=generator) < 0.5, -1)
    elif case == "all to one rank":
        chosen = (chosen % EACH) + 2 * EACH
    elif case == "none":
        chosen = torch.full_like(chosen, -1)
    tokens = torch.randn(count, D, generator=generator, dtype=torch.float64)
    weights = torch.rand(count, K, generator=generator, dtype=torch.float64)
    return tokens.requires_grad_(), weights.requires_grad_(), chosen


def found(stack, inputs):
    """What it gives, and the gradients of tokens, weights and the stack's parameters."""
    tokens, weights, chosen = inputs
    y = stack(tokens, weights, chosen)
    y.square().sum().backward()
    return y.detach(), tokens.grad, weights.grad


def shared(per_node=0, dispatcher=None):
    """This rank's part of a stack, and the stack that ranks share."""
    rank = dist.get_rank()
    part = Stack(rank * EACH, (rank + 1) * EACH)
    local = LocalExperts(part, part.forward)

    def exchange(forward, group, experts, outer=1):
        ranks = ExpertRanks(group, experts, outer)
        return Exchange(forward, (dispatcher or AllToAll()).build(None, ranks))

    if not per_node:
        return part, exchange(local, dist.group.WORLD, EACH)
    ranks = torch.arange(RANKS).view(-1, per_node)
    across, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist())
    within, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    return part, exchange(exchange(local, within, EACH, outer=len(ranks)), across, EACH * per_node)


def all_cases(per_node, dispatcher):
    """What a rank finds in each case, with the gradient of its part of the stack."""
    part, stack = shared(per_node, dispatcher)
    results = {}
    for case in CASES:
        part.weight.grad = None
        results[case] = *found(stack, tokens_of(dist.get_rank(), case)), part.weight.grad
    return results


CASES = ("every choice", "some left out", "all to one rank", "none")


@pytest.mark.parametrize("dispatcher", [AllToAll(), AllGather()], ids=lambda component: type(component).__name__)
@pytest.mark.parametrize("per_node", [0, 2])
def test_ranks_that_share_a_stack_give_what_one_process_gives(per_node, dispatcher):
    """One rank has no tokens at all."""
    ranks = run_on_ranks(RANKS, lambda rank: all_cases(per_node, dispatcher))
    for case in CASES:
        stack = Stack()
        expected = [found(stack, tokens_of(rank, case)) for rank in range(RANKS)]
        for rank in range(RANKS):
            own = stack.weight.grad[rank * EACH : (rank + 1) * EACH]
            for seen, right in zip(ranks[rank][case], (*expected[rank], own), strict=True):
                torch.testing.assert_close(seen, right, rtol=1e-12, atol=1e-12, msg=f"{case}, rank {rank}")


def sent_by(rank, per_node):
    """Bytes that leave this rank for each other one in a pass there and back, by the width of what is sent."""
    _, stack = shared(per_node)
    send, sent = dist.all_to_all_single, Counter()

    def counted(received, x, outputs=None, inputs=None, group=None, **more):
        for place, rows in enumerate(inputs or [1] * group.size()):
            other = dist.get_global_rank(group, place)
            if other != rank:
                sent[other, x[0].numel() if len(x) else x.shape[1:].numel()] += rows * x.shape[1:].numel() * ELEMENT
        return send(received, x, outputs, inputs, group=group, **more)

    tokens, weights, chosen = tokens_of(rank, "every choice")
    with mock.patch.object(dist, "all_to_all_single", counted):
        y = stack(tokens, weights, chosen)
        forward = Counter(sent)
        y.sum().backward()
    return forward, sent - forward


def distinct(chosen, experts):
    """Token and place of each pair of which the place has any of the token's experts; each has so many."""
    return [(token, place) for token, own in enumerate(chosen.tolist()) for place in {one // experts for one in own}]


def test_a_token_travels_once_to_each_rank_that_has_any_of_its_experts():
    """There as the token, back as a sum; in the backward pass the other way."""
    ranks = run_on_ranks(RANKS, lambda rank: sent_by(rank, 0))
    choices = [tokens_of(rank, "every choice")[2] for rank in range(RANKS)]
    pairs = [Counter(place for _, place in distinct(chosen, EACH)) for chosen in choices]
    for rank, passes in enumerate(ranks):
        for other in {*range(RANKS)} - {rank}:
            rows = pairs[rank][other] + pairs[other][rank]
            assert [sent[other, D] for sent in passes] == [rows * D * ELEMENT] * 2
    every_choice = sum((chosen // EACH != rank).sum().item() for rank, chosen in enumerate(choices))
    once = sum(pairs[rank][other] for rank in range(RANKS) for other in range(RANKS) if other != rank)
    assert once < 0.9 * every_choice, "else nothing would be seen"


def test_a_token_crosses_to_a_node_once():
    ranks = run_on_ranks(RANKS, lambda rank: sent_by(rank, 2))
    choices = [tokens_of(rank, "every choice")[2] for rank in range(RANKS)]
    pairs = [Counter(node for _, node in distinct(chosen, 2 * EACH)) for chosen in choices]
    for rank, passes in enumerate(ranks):
        same_place, other_place = (rank + 2) % RANKS, (3 - rank)
        rows = pairs[rank][same_place // 2] + pairs[same_place][rank // 2]
        for sent in passes:
            assert sent[same_place, D] == rows * D * ELEMENT
            assert sent[other_place, D] == 0


@pytest.mark.parametrize(("places", "experts", "choices"), [(4, 2, 3), (2, 4, 3), (8, 1, 8), (4, 2, 20), (1, 8, 2)])
def test_plans_expect_as_many_copies_as_random_choices_make(places, experts, choices):
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(20_000, places * experts, generator=generator).argsort(1)[:, :choices]
    seen = len(distinct(chosen, experts)) / len(chosen)
    assert places_of_a_token(places, experts, choices) == pytest.approx(seen, rel=0.01)


@pytest.mark.parametrize("per_node", [0, 2])
def test_a_plan_sends_what_is_expected(per_node):
    def copies(rank):
        part, stack = shared(per_node)
        part.forward = lambda tokens, *_: seen.append(tokens.shape) or tokens
        seen = []
        innermost = stack.forward if per_node else stack
        object.__setattr__(innermost, "forward", part.forward)
        with FakeTensorMode():
            stack(torch.empty(1000, D), torch.empty(1000, K), torch.zeros(1000, K, dtype=torch.long))
        return seen

    expected = round(1000 * places_of_a_token(RANKS, EACH, K))
    for [shape] in run_on_ranks(RANKS, copies):
        assert abs(shape[0] - expected) <= 1
        assert shape[1] == D


def events_of_a_journey(rank):
    """What happens when something is computed while rows travel."""
    events, send = [], dist.all_to_all_single

    class Waiting:
        def __init__(self, work):
            self.work = work

        def wait(self):
            events.append("arrive")
            self.work.wait()

    def depart(*args, **kwargs):
        events.append("depart")
        return Waiting(send(*args, **kwargs))

    x = torch.randn(2, D, dtype=torch.float64, requires_grad=True)
    with mock.patch.object(dist, "all_to_all_single", depart):
        arrive = send_rows(x * 1.0, [1, 1], [1, 1], dist.group.WORLD)
        other = x.square()
        other.register_hook(lambda grad: events.append("gradient of the rest"))
        events.append("the rest")
        (arrive() * other).sum().backward()
    return events


def test_what_is_computed_while_rows_travel_has_its_gradients_computed_while_theirs_do():
    for events in run_on_ranks(2, events_of_a_journey):
        assert events == ["depart", "the rest", "arrive", "depart", "gradient of the rest", "arrive"]


def test_ranks_that_gather_send_all_tokens_there_and_their_sums_back():
    """Padding and counts included; the numbers of a planned step are the same where ranks have equally many tokens."""

    def elements(rank):
        _, stack = shared(0, AllGather())
        gathered = []
        gather, scatter = collectives._all_gather, collectives._reduce_scatter

        def counted(send):
            def sent(target, source, **more):
                gathered.append((len(target), len(source), source[0].numel()))
                return send(target, source, **more)

            return sent

        with (
            mock.patch.object(collectives, "_all_gather", counted(gather)),
            mock.patch.object(collectives, "_reduce_scatter", counted(scatter)),
        ):
            stack(*tokens_of(rank, "every choice"))
            return gathered

    longest = 5 * (RANKS - 1)
    for sizes in run_on_ranks(RANKS, elements):
        counts = (RANKS * (RANKS + 1), RANKS + 1, 1)
        there = [(RANKS * longest, longest, width) for width in (2 * K, D)]
        assert sizes == [counts, *there, (longest, RANKS * longest, D)]


class Forgetful:
    """A dispatcher that computes with its own experts alone, and loses a token on the way back."""

    def dispatch(self, tokens, weights, chosen, rows):
        return Dispatched(lambda: tokens, weights, chosen.where(chosen < EACH, -1))

    def combine(self, outputs, dispatched):
        return outputs[1:]


def test_a_dispatcher_that_loses_tokens_is_named():
    stack = Stack(0, EACH)
    with pytest.raises(ForgeError, match=r"Forgetful.combine returns \(4, 7\) for tokens \(5, 7\)"):
        Exchange(stack, Forgetful())(*tokens_of(1, "every choice"))


class TestWhatIsRefused:
    def problems(self, layout, **keys):
        return list(ExpertParallel(**keys).problems(None, layout))

    def test_ranks_that_data_is_not_divided_among(self):
        check_problems(self.problems(Layout(shard=2, cp=3), degree=4), at("degree", 4, "shard 2 x cp 3 = 6"))
        check_problems(self.problems(Layout(), degree=4), at("degree", 4, "cp 1 = 1", "[parallel.fsdp]"))
        assert not self.problems(Layout(shard=2, cp=2), degree=4)

    @pytest.mark.parametrize(
        ("degree", "per_node", "choices"),
        [(8, 3, "2 or 4"), (8, 8, "2 or 4"), (8, 1, "2 or 4"), (2, 2, "leave it out")],
    )
    def test_nodes_that_ranks_do_not_make(self, degree, per_node, choices):
        found = self.problems(Layout(shard=degree), degree=degree, ranks_per_node=per_node)
        check_problems(found, at("ranks_per_node", per_node, degree, choices))
        assert not self.problems(Layout(shard=8), degree=8, ranks_per_node=4)
