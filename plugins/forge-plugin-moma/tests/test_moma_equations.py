"""The layer computes the paper's equations, forward and backward, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from moma_reference import auxiliary, by_experts, by_tokens, output, scores
from torch import Tensor
from torch.nn import functional as F

from forge_kit.nn.noise import token_noise
from forge_plugin_moe import MoE
from forge_plugin_moma import MoMa
from forge_plugin_moma.modules.noise import GumbelNoise
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing.runs import tiny_run

GROUPS = {"text": 4, "image": 2, "video": 3}
D = 8
IDS = torch.tensor([
    [5, 6, -1, -1, -1, -1, 7, 8, -2, -2, 9, -1],
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
    [-1, -1, -1, 0, -2, 0, 0, -3, -3, 1, 2, 3],
])  # fmt: skip
"""A row of all modalities; one of text; one with sound, for which there are no experts."""


def layer_of(folder, router, ffn=None):
    model = Transformer(
        dim=D, layers=1, vocab_size=32, attention=GroupedQueryAttention(heads=2),
        ffn=ffn or MoE(experts=9, hidden=6, router=router),
    )  # fmt: skip
    run = tiny_run(folder, model=model, seq_len=IDS.shape[1], precision="fp64")
    layer = run.model.layers["0"].ffn
    for number, parameter in enumerate(layer.parameters()):
        draws = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        parameter.data = draws
    return layer.train(), run.context.auxiliary


def tokens():
    return torch.randn(*IDS.shape, D, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


def gradients(y: Tensor, x: Tensor, weights) -> dict[str, Tensor]:
    wanted = {"x": x, **weights}
    found = torch.autograd.grad(y.sin().sum(), list(wanted.values()), allow_unused=True)
    return {name: torch.zeros_like(wanted[name]) if g is None else g for name, g in zip(wanted, found, strict=True)}


def assert_equal(layer, batch, expected_taken) -> Tensor:
    """Returns which experts compute which position, after the comparison of outputs and gradients."""
    weights, x = dict(layer.named_parameters()), tokens().requires_grad_()
    gates, taken = expected_taken(weights, x)
    expected = output(weights, x, gates, taken)
    actual = layer(x, batch)
    assert expected.detach().std() > 0.1
    assert (actual - expected).abs().max() < 1e-9
    ours, theirs = gradients(actual, x, weights), gradients(expected, x, weights)
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() < 1e-9, name
    assert theirs["router.weight"].abs().max() > 1e-3
    return taken


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_tokens_choose(tmp_path, top_k, training):
    layer, _ = layer_of(tmp_path, MoMa(experts=GROUPS, top_k=top_k))

    def expected(weights, x):
        gates = scores(weights, x)
        return gates, by_tokens(gates, IDS, GROUPS, top_k)

    taken = assert_equal(layer.train(training), {"input_ids": IDS}, expected)
    assert taken.sum() == top_k * (IDS.numel() - 2), "every position but the two of sound"


@pytest.mark.parametrize("factor", [1.0, 1.3, 2.0, 5.0])
def test_experts_choose(tmp_path, factor):
    layer, _ = layer_of(tmp_path, MoMa(experts=GROUPS, choose="experts", capacity_factor=factor))

    def expected(weights, x):
        gates = scores(weights, x)
        return gates, by_experts(gates, IDS, GROUPS, factor)

    taken = assert_equal(layer, {"input_ids": IDS}, expected)
    counts = set(taken.sum(-1).flatten().tolist())
    if factor > max(GROUPS.values()):
        assert counts == {0, *GROUPS.values()}, "each expert takes every position of its modality, and no other"
    else:
        assert counts >= {0, 1, 2}, "some positions have no expert, others several"


def test_auxiliary_routers_choose_in_evaluation_and_the_main_one_weighs(tmp_path):
    layer, _ = layer_of(tmp_path, MoMa(experts=GROUPS, choose="experts"))

    def expected(weights, x):
        return scores(weights, x), auxiliary(weights, x, IDS, GROUPS) > 0.5

    taken = assert_equal(layer.eval(), {"input_ids": IDS}, expected)
    assert 0.1 < taken.double().mean() < 0.9


@pytest.mark.parametrize("choose", ["tokens", "experts"])
def test_gumbel_noise_moves_scores_in_training_alone(tmp_path, choose):
    layer, _ = layer_of(tmp_path, MoMa(experts=GROUPS, choose=choose, gumbel_noise=True))
    batch = {"input_ids": IDS, "draw": torch.tensor([3, 4, 5])}

    def expected(weights, x, noise=True):
        draw = batch["draw"] ^ layer.router.noise.salt
        uniform = token_noise({**batch, "draw": draw}, 9, "moma").double()
        gates = scores(weights, x, uniform.log() - (1 - uniform).log() if noise else None)
        return gates, by_tokens(gates, IDS, GROUPS, 1) if choose == "tokens" else by_experts(gates, IDS, GROUPS, 1.0)

    noisy = assert_equal(layer, batch, expected)
    plain = expected(dict(layer.named_parameters()), tokens(), noise=False)[1]
    assert not torch.equal(noisy, plain)
    if choose == "tokens":
        assert_equal(layer.eval(), batch, lambda weights, x: expected(weights, x, noise=False))


def test_the_noise_is_the_difference_of_two_gumbel_variables():
    noise, ids = GumbelNoise(layer=3, experts=50), torch.full((40, 100), -1)
    noise.init_buffers(torch.device("cpu"))
    ours = noise({"input_ids": ids, "draw": torch.arange(40)}, torch.float64)
    uniform = torch.rand(2, *ours.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    first, second = -(-uniform.log()).log()
    levels = torch.linspace(0.01, 0.99, 25, dtype=torch.float64)
    quantiles = [values.flatten().quantile(levels) for values in (ours, first - second)]
    torch.testing.assert_close(*quantiles, atol=0.08, rtol=0)
    assert ours.var().item() == pytest.approx(math.pi**2 / 3, rel=0.02)


def test_auxiliary_routers_learn_by_their_cross_entropy_alone(tmp_path):
    """And nothing else learns by it."""
    found = {}
    for weight in (10.0, 20.0):
        layer, collected = layer_of(tmp_path, MoMa(experts=GROUPS, choose="experts", auxiliary_weight=weight))
        collected.begin_step(torch.tensor(30), sequences=len(IDS), micro_batches=1)
        weights, x = dict(layer.named_parameters()), tokens().requires_grad_()
        found[weight] = gradients(layer(x, {"input_ids": IDS}), x, weights)
    predicted = auxiliary(weights, x.detach(), IDS, GROUPS)
    taken = by_experts(scores(weights, x), IDS, GROUPS, 1.0).double()
    entropies = F.binary_cross_entropy(predicted, taken, reduction="none").where(predicted > 0, 0)
    means = sum(part.mean(-1) for part in entropies.split(list(GROUPS.values()), -1))
    value = means.mean()
    expected = torch.autograd.grad(value, [p for name, p in weights.items() if "auxiliary" in name])
    names = [name for name in weights if "auxiliary" in name]
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(found[10.0][name], 10 * gradient, rtol=1e-9, atol=1e-12, msg=name)
        assert gradient.abs().max() > 1e-4
    assert all(torch.equal(found[10.0][name], found[20.0][name]) for name in {"x", *weights} - {*names})
    assert collected.totals()["moma/auxiliary"].item() == pytest.approx(value.item(), rel=1e-12)


@pytest.mark.parametrize("choose", ["tokens", "experts"])
def test_gradients_reach_exactly_the_experts_of_the_modality(tmp_path, choose):
    layer, _ = layer_of(tmp_path, MoMa(experts=GROUPS, choose=choose))
    for modality, own in {0: range(4), -1: range(4, 6), -2: range(6, 9), -3: range(0)}.items():
        x, batch = tokens(), {"input_ids": torch.full_like(IDS, modality)}
        layer.zero_grad()
        y = layer(x, batch)
        y.sin().sum().backward()
        for name in ("router.weight", "experts.gate.weight", "experts.up.weight", "experts.down.weight"):
            parameter = layer.get_parameter(name)
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            reached = [number for number, part in enumerate(grad) if part.abs().max() > 0]
            assert reached == list(own), (modality, name)
        assert bool(y.any()) == bool(own)


@pytest.mark.parametrize("choose", ["tokens", "experts"])
def test_another_modalitys_positions_never_change_the_routing(tmp_path, choose):
    layer, _ = layer_of(tmp_path, MoMa(experts=GROUPS, choose=choose, z_loss=1.0, gumbel_noise=True))
    x, batch = tokens(), {"input_ids": IDS}
    for training in (True, False):
        weights, chosen = layer.train(training).router(x, batch)
        for modality in (-1, -2, -3):
            others = (modality == IDS).unsqueeze(-1)
            after, numbers = layer.router(torch.where(others, 7 * x.flip(1) + 1, x), batch)
            kept = ~others.expand_as(weights)
            assert torch.equal(weights[kept], after[kept])
            assert torch.equal(chosen[kept], numbers[kept])


def test_text_alone_is_what_sigmoid_scores_among_the_text_experts_give(tmp_path):
    layer, _ = layer_of(tmp_path, MoMa(experts=GROUPS, top_k=2))
    ids = torch.randint(32, IDS.shape, generator=torch.Generator().manual_seed(0))
    weights, chosen = layer.router(tokens(), {"input_ids": ids})
    gates = (tokens() @ layer.router.weight[:4].T).sigmoid()
    expected = gates.topk(2)
    assert torch.equal(chosen, expected.indices)
    torch.testing.assert_close(weights, expected.values, rtol=1e-12, atol=0)
