"""Sums over links: measured, wrong, slow."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from forge_core.contracts.errors import ForgeError
from forge_plugin_resilience.health import links as links_module
from forge_plugin_resilience.health.links import Link, Links, measure_links, pairings, slow_links
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import lacks, naming

CPU = torch.device("cpu")


def measured(ranks, trouble=lambda rank: None):
    def work(rank):
        trouble(rank)
        return measure_links(CPU, 1.0, 3)

    every = run_on_ranks(ranks, work)
    assert all(links == every[0] for links in every), "every rank has the same list"
    return every[0]


def test_two_ranks_have_one_link_and_its_sum_is_right():
    links = measured(2)
    assert [(link.ranks, link.within_machine) for link in links] == [((0, 1), True), ((0, 1), False)]
    assert all(link.is_right and link.gigabytes_per_s > 0 for link in links)
    assert slow_links(links, 0.7, 0.0) == []
    [text, *_] = slow_links(links, 0.7, 1e6)
    assert not lacks(text, "rank 0", "rank 1")


def test_of_four_ranks_a_wrong_sum_and_a_slow_rank_are_named():
    def trouble(rank):
        all_reduce = dist.all_reduce
        # A clock that only this test moves: on a busy machine any link may be slow. A reading takes 1 ms
        seconds = itertools.count(0.0, 0.1 if rank == 3 else 0.001)
        links_module.time = SimpleNamespace(perf_counter=lambda: next(seconds))

        def wrong(tensor, *args, **kwargs):
            work = all_reduce(tensor, *args, **kwargs)
            if tensor.numel() > 1000:
                tensor[17] += 1
            return work

        if rank == 1:
            dist.all_reduce = wrong

    links = measured(4, trouble)
    assert sorted(link.ranks for link in links) == [(0, 1), (0, 1, 2, 3), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert [link.ranks for link in links if not link.is_right] == [(0, 1, 2, 3)]
    host = links[0].hosts[0]
    texts = slow_links(links, 0.7, 0.0)
    assert not lacks(texts[-1], f"rank 3 on {host}", "all")
    slow = [text for text in texts if "GB/s" in text]
    assert len(slow) == 3
    assert all(f"rank 3 on {host}" in text for text in slow)


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_in_each_round_everyone_has_one_partner_and_no_pair_comes_twice(count):
    rounds = list(pairings(count, 100))
    for pairs in rounds:
        members = [member for pair in pairs for member in pair]
        assert len(members) == len(set(members)) == count // 2 * 2
    pairs = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2


def test_a_slow_pair_is_named_by_its_hosts():
    def link(one, other, speed):
        return Link(ranks=(one, other), hosts=(f"gpu{one}", f"gpu{other}"), gigabytes_per_s=speed, is_right=True)

    links = [link(0, 8, 20.0), link(16, 24, 21.0), link(0, 16, 9.0), link(8, 24, 20.5)]
    [text] = slow_links(links, 0.7, 0.0)
    assert not lacks(text, "rank 0 on gpu0", "rank 16 on gpu16", "9 GB/s", 20.2)


def test_the_network_between_machines_of_two_ranks_is_not_compared_with_their_sums():
    def link(ranks, speed, within):
        hosts = tuple(f"gpu{rank // 2}" for rank in ranks)
        return Link(ranks=ranks, hosts=hosts, gigabytes_per_s=speed, is_right=True, within_machine=within)

    sums = [link(ranks, 300.0, True) for ranks in ((0, 1), (2, 3), (4, 5))]
    assert slow_links([*sums, *(link(ranks, 25.0, False) for ranks in ((0, 2), (0, 4), (2, 4)))], 0.7, 0.0) == []


@pytest.mark.parametrize(
    ("is_right", "on_fault", "refused"), [(False, "stop", True), (False, "warn", False), (True, "stop", False)]
)
def test_a_wrong_sum_refuses_to_start(monkeypatch, is_right, on_fault, refused):
    link = Link(ranks=(0, 1), hosts=("gpu01", "gpu02"), gigabytes_per_s=20.0, is_right=is_right)
    monkeypatch.setattr(links_module, "measure_links", lambda *_: [link])
    facts = naming("rank 0 on gpu01", "rank 1 on gpu02", "wrong")
    context = SimpleNamespace(model=torch.nn.Linear(1, 1))
    warned = nullcontext() if is_right else pytest.warns(UserWarning, match=facts)
    raised = pytest.raises(ForgeError, match=facts) if refused else nullcontext()
    with warned, raised:
        Links(on_fault=on_fault).on_train_begin(context)
