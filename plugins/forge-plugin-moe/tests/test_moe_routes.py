"""Recorded experts take the place of those that a router would choose; their weights are of its scores."""

from __future__ import annotations

import pytest
import torch

from forge_kit.nn.routes import DIFFER, RouteRecord, recorded_routes
from forge_plugin_moe import Hash, MoE, SigmoidTopK, SoftmaxTopK
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing.runs import tiny_run

E, K, S, B = 8, 2, 6, 3


def router_in(folder, router):
    ffn = MoE(experts=E, hidden=16, router=router)
    model = Transformer(dim=16, layers=1, vocab_size=32, attention=GroupedQueryAttention(heads=2), ffn=ffn)
    run = tiny_run(folder, model=model, seq_len=S, global_batch_size=B, precision="fp64")
    return run, run.model.layers["0"].ffn.router


ROUTERS = {
    "softmax": (SoftmaxTopK(top_k=K), lambda logits, chosen: logits.gather(-1, chosen).softmax(-1)),
    "before": (
        SoftmaxTopK(top_k=K, normalise="before", scaling=2.0),
        lambda logits, chosen: 2 * logits.softmax(-1).gather(-1, chosen),
    ),
    "sigmoid": (
        SigmoidTopK(top_k=K),
        lambda logits, chosen: torch.nn.functional.normalize(logits.sigmoid().gather(-1, chosen), p=1, dim=-1),
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_weights_are_of_the_recorded_experts(tmp_path, name):
    component, expected = ROUTERS[name]
    run, router = router_in(tmp_path, component)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(B, S, 16, generator=generator, dtype=torch.float64)
    own = router(x, {})[1]
    recorded = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(B * S)]).view(B, S, K)
    recorded[0, 0] = own[0, 0].flip(-1)  # the same experts in another order
    recorded[1, 2:] = -1  # the router chooses
    run.context.auxiliary.begin_step(torch.tensor(B * S), B, 1)
    weights, chosen = router(x, {router.replay.entry: recorded[:, None].to(torch.int16)})
    assert chosen.equal(recorded.where(recorded >= 0, own))
    torch.testing.assert_close(weights, expected(router.logits(x), chosen), rtol=1e-12, atol=0)
    # Their gradient reaches the scores of the recorded experts
    (weights * torch.randn(weights.shape, generator=generator)).sum().backward()
    assert router.weight.grad.abs().sum(1).nonzero()[:, 0].tolist() == sorted({*chosen.flatten().tolist()})
    differ = (recorded.sort(-1).values != own.sort(-1).values).any(-1) & (recorded >= 0).all(-1)
    [counts] = [values for key, values in run.context.auxiliary.totals().items() if getattr(key, "name", "") == DIFFER]
    assert counts.tolist() == [differ.sum(), B * S - (S - 2)]


def test_what_is_recorded_gives_the_same_output(tmp_path):
    run, router = router_in(tmp_path, SoftmaxTopK(top_k=K))
    ids = torch.randint(32, (B, S), generator=torch.Generator().manual_seed(1))
    record = RouteRecord(B, S)
    with torch.no_grad():
        with recorded_routes(run.model, record):
            hidden = run.model({"input_ids": ids})
        record.positions.append(torch.arange(S).expand(B, S))
        record.assign(range(B))
        routes = {entry: table[:, None] for entry, table in record.tables().items()}
        assert [*routes] == [router.replay.entry]
        assert run.model({"input_ids": ids, **routes}).equal(hidden)
        other = {entry: (table + 1) % E for entry, table in routes.items()}
        assert not run.model({"input_ids": ids, **other}).equal(hidden)
        # A context that has ended records no more
        assert not record.tables()[router.replay.entry].lt(0).any()
        run.model({"input_ids": ids})
        assert not record._pending


def test_a_hash_of_tokens_needs_no_record(tmp_path):
    assert Hash.replays_routes
    assert "replay" not in vars(router_in(tmp_path, Hash(top_k=K))[1])
