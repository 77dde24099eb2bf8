"""Losses and biases that balance experts, against their equations, with weights too large to hide a mistake."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from attrs import define, field

from forge_core.contracts.components import TrainingHook
from forge_core.data.loader import TrainLoader
from forge_core.engine.step import Stepper, metrics
from forge_core.job import MetricsSection
from forge_plugin_moe import MoE, SigmoidTopK, SoftmaxTopK
from forge_plugin_moe.modules.topk import summarise_bias
from forge_plugin_parallel import ContextParallel
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing.laws import Interrupted, resumption_law
from forge_testing.processes import run_on_ranks
from forge_testing.runs import advance, tiny_run

E, K, S, B = 4, 2, 16, 8
SIZES = {"seq_len": S, "global_batch_size": B, "precision": "fp64"}


def model_of(router, layers=1, **keys):
    attention = GroupedQueryAttention(heads=2)
    ffn = MoE(experts=E, hidden=16, router=router, **keys)
    return Transformer(dim=16, layers=layers, vocab_size=32, attention=attention, ffn=ffn)


def scores_of(router, logits):
    """p of the equations, (B, S, E), and the experts chosen."""
    if isinstance(router, SoftmaxTopK):
        scores = logits.softmax(-1)
        return scores, scores.topk(K).indices
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True), scores.topk(K).indices


def expected_loss(which, router, logits, load):
    """As published; `load` (E,), what the step before counted."""
    p, chosen = scores_of(router, logits)
    used = torch.nn.functional.one_hot(chosen, E).sum(2).double()  # (B, S, E)
    if which == "sequence_balance":  # DeepSeek-V3, equations 17 to 20
        f = E / (K * S) * used.sum(1)
        return (f * p.mean(1)).sum(1).mean()
    if which == "micro_batch_balance":  # Switch, equations 4 to 6, of the one micro-batch
        f = used.mean((0, 1)) / K
        return E * (f * p.mean((0, 1))).sum()
    if which == "batch_balance":
        f = E * load / load.sum() if load.sum() else load
        return (f * p.mean((0, 1))).sum()
    return logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("which", ["sequence_balance", "batch_balance", "micro_batch_balance", "z_loss"])
@pytest.mark.parametrize("kind", [SoftmaxTopK, SigmoidTopK])
def test_a_loss_has_the_value_and_gradient_of_its_equation(tmp_path, which, kind):
    gradients = {}
    for weight in (0.0, 10.0):
        run = tiny_run(tmp_path, model=model_of(kind(top_k=K, **{which: weight})), **SIZES)
        router, seen = run.model.layers["0"].ffn.router, []
        with torch.no_grad():
            router.weight.mul_(20)
        load = torch.arange(1.0, E + 1, dtype=torch.float64)
        if which == "batch_balance" and weight:
            router.balance.load.copy_(load)
        router.register_forward_hook(lambda module, inputs, outputs, seen=seen: seen.append(inputs[0]))
        stepper, loader = Stepper(run), TrainLoader(run.job, run.datasets, run.context)
        _, sums = stepper.gradients(loader.next_step(), 0)
        loader.close()
        gradients[weight] = router.weight.grad.clone()
    x, weights = seen[0].detach(), router.weight.detach().requires_grad_()
    value = expected_loss(which, router.component, x @ weights.T, load)
    value.backward()
    assert metrics(sums)[f"moe/{which}"].item() == pytest.approx(value.item(), rel=1e-10)
    torch.testing.assert_close(gradients[10.0] - gradients[0.0], 10 * weights.grad, rtol=1e-8, atol=1e-12)


def test_the_balance_of_a_micro_batch_is_the_mean_over_the_pieces_of_its_sequences(tmp_path):
    def of_piece(rank):
        model = model_of(SoftmaxTopK(top_k=K, micro_batch_balance=1.0))
        stages = {"cp": ContextParallel(degree=2)}
        run = tiny_run(tmp_path, model=model, parallel=stages, micro_batch_size=B, **SIZES)
        seen = []
        run.model.layers["0"].ffn.router.balance.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
        stepper, loader = Stepper(run), TrainLoader(run.job, run.datasets, run.context)
        _, sums = stepper.gradients(loader.next_step(), 0)
        loader.close()
        _, p, chosen = seen[0]
        f = torch.nn.functional.one_hot(chosen, E).sum(2).double().mean((0, 1)) / K
        return metrics(sums)["moe/micro_batch_balance"].item(), E * (f * p.mean((0, 1))).sum().item()

    (first, one), (second, other) = run_on_ranks(2, of_piece)
    assert one != other
    assert first == second == pytest.approx((one + other) / 2, rel=1e-10)


@pytest.mark.parametrize("which", ["sequence_balance", "batch_balance", "z_loss"])
@pytest.mark.parametrize("recompute", [False, True])
def test_micro_batches_change_nothing(tmp_path, which, recompute):
    """Nor does recomputation; over three steps, so that the batch of the step before counts."""
    from forge_plugin_parallel import ActivationCheckpointing

    found = []
    for micro_batch_size in (B, 2):
        router = SigmoidTopK(top_k=K, bias_rate=0.01, **{which: 10.0})
        stages = {"activation_checkpointing": ActivationCheckpointing(mode="full")} if recompute else {}
        run = tiny_run(
            tmp_path, model=model_of(router, layers=2), micro_batch_size=micro_batch_size, parallel=stages, **SIZES
        )
        advance(run, 3)
        found.append({name: tensor.detach().clone() for name, tensor in run.model.state_dict().items()})
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-9, atol=1e-11, msg=name)
    assert found[0]["layers.1.ffn.router.bias"].abs().max() > 0.005


def test_a_bias_rises_for_experts_below_the_mean_and_falls_for_those_above(tmp_path):
    run = tiny_run(tmp_path, model=model_of(SigmoidTopK(top_k=K, bias_rate=0.25)), **SIZES)
    router = run.model.layers["0"].ffn.router
    advance(run, 1)
    load = run.context.auxiliary.counted("moe/chosen", 0)
    assert load.sum() == B * S * K
    assert torch.equal(router.bias.double(), 0.25 * (load.mean() - load).sign())
    assert not any("bias" in item.name for item in run.parameters), "no optimizer moves it"


def test_weights_are_divided_by_their_sum_and_a_number(tmp_path):
    run = tiny_run(tmp_path, model=model_of(SigmoidTopK(top_k=K, normalise_eps=0.5)), **SIZES)
    router = run.model.layers["0"].ffn.router
    x = torch.randn(1, S, run.job.model.dim, dtype=torch.float64)
    weights, chosen = router(x, {})
    scores = router.logits(x).sigmoid().gather(-1, chosen)
    torch.testing.assert_close(weights, scores / (scores.sum(-1, keepdim=True) + 0.5), rtol=1e-12, atol=0)


def test_scores_may_be_the_softmax_of_logits(tmp_path):
    """In choice, with the bias, and in weights, without it."""
    run = tiny_run(tmp_path, model=model_of(SigmoidTopK(top_k=K, score_function="softmax")), **SIZES)
    router = run.model.layers["0"].ffn.router
    router.bias.copy_(torch.tensor([0.0, 0.3, 0.1, 0.2]))
    x = 40 * torch.randn(1, S, run.job.model.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights, chosen = router(x, {})
    p = router.logits(x).softmax(-1)
    expected = (p + router.bias).topk(K).indices
    assert (expected != p.topk(K).indices).any()
    assert torch.equal(chosen, expected)
    kept = p.gather(-1, expected)
    torch.testing.assert_close(weights, kept / kept.sum(-1, keepdim=True), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("rate", "low", "high"), [(0.0, 0.99, 1.0), (0.05, 0.0, 0.6)])
def test_a_bias_balances(tmp_path, rate, low, high):
    """From one that sends every token to one expert."""
    run = tiny_run(tmp_path, model=model_of(SigmoidTopK(top_k=1, bias_rate=rate, init_std=1.0)), **SIZES)
    run.model.layers["0"].ffn.router.bias[2] = 1.0
    advance(run, 20)
    load = run.context.auxiliary.counted("moe/load", 0)
    assert load.sum() == B * S
    assert low <= load.max() / load.sum() <= high


@define(kw_only=True, slots=False)
class Skip(TrainingHook):
    may_skip = True

    def on_gradients(self, context):
        context.skip_update("to see what stays")


def test_a_skipped_update_leaves_the_bias(make_job, train):
    """One step: with so high a rate, the second would take back what the first does."""
    summary = train(make_job(model=model_of(SigmoidTopK(top_k=K, bias_rate=0.5)), steps=1, **SIZES), Skip())
    from forge_kit.tools.checkpoints import stored_tensors
    from forge_kit.tools.whole_tensors import read_whole

    checkpoint = summary.folder / "checkpoints/step-1"
    stored = {name: entry for name, entry in stored_tensors(checkpoint).items() if name.endswith("router.bias")}
    assert read_whole(checkpoint, stored, stored)["model.layers.0.ffn.router.bias"].abs().max() == 0


def test_an_update_that_only_the_device_knows_to_be_skipped_changes_nothing(tmp_path):
    """And what is logged of the step stays."""
    run = tiny_run(tmp_path, model=model_of(SigmoidTopK(top_k=K, bias_rate=0.5, batch_balance=1.0)), **SIZES)
    advance(run, 1)
    router, auxiliary = run.model.layers["0"].ffn.router, run.context.auxiliary
    bias, load, logged = router.bias.clone(), router.balance.load.clone(), auxiliary.summaries()
    assert load.sum() == B * S * K
    for kept in (False, True):
        auxiliary.forget_counted_unless(torch.tensor(kept))
        for module in (router, router.balance):
            module.after_update()
        assert torch.equal(router.balance.load, load)
        assert torch.equal(router.bias, bias) is not kept
        assert auxiliary.summaries() == logged


def test_a_step_that_the_device_skips_leaves_the_bias(tmp_path, monkeypatch):
    """The optimizer is told by `found_inf`, and routers by the counts, which are zeros then."""
    monkeypatch.setattr(Stepper, "_can_mask", lambda self: True)
    run = tiny_run(tmp_path, model=model_of(SigmoidTopK(top_k=K, bias_rate=0.5)), **SIZES)
    monkeypatch.setattr(run.optimizer, "step", lambda: None)  # only fused ones take `found_inf`
    stepper, loader = Stepper(run), TrainLoader(run.job, run.datasets, run.context)
    router = run.model.layers["0"].ffn.router
    biases = []
    for norm in (math.nan, 1.0):
        _, sums = stepper.gradients(loader.next_step(), 0)
        context = SimpleNamespace(grad_norm=torch.tensor(norm), requests=SimpleNamespace(skip=""))
        stepper.update(context, sums["loss_sum"])
        biases.append(router.bias.abs().max().item())
    loader.close()
    assert biases == [0.0, 0.5]


def test_the_largest_range_of_biases_is_logged():
    rows = {0: torch.tensor([0.1, -0.2, 0.0]), 1: torch.tensor([0.5, -0.3, 0.0]), 2: torch.zeros(3)}
    assert summarise_bias(rows)["moe/bias_range"].item() == pytest.approx(0.8)


# Biases and the counts of the step before are in the checkpoint.
BALANCED = SigmoidTopK(top_k=K, bias_rate=0.05, batch_balance=1.0)
test_resumption = resumption_law(
    Interrupted("balance", changes=lambda: {"model": model_of(BALANCED, layers=2), **SIZES})
)


def test_what_is_logged_of_the_load(make_job, train, lines):
    """Of all layers together; counts of every expert of every layer."""
    model, sizes = model_of(SigmoidTopK(top_k=1, bias_rate=0.1), layers=2), {"micro_batch_size": 2, **SIZES}
    job = make_job(model=model, steps=2, metrics=MetricsSection(counts_interval=1), **sizes)
    first, second = lines(train(job))
    loads = [first["counts"]["moe/load"][layer] for layer in "01"]
    assert [sum(load) for load in loads] == [B * S] * 2
    assert first["moe/dead_experts"] == sum(load.count(0) for load in loads)
    assert first["moe/fullest_expert"] == pytest.approx(max(max(load) for load in loads) * E / (B * S))
    shares = [[tokens / (B * S) for tokens in load] for load in loads]
    entropies = [-sum(p * math.log(p) for p in share if p) / math.log(E) for share in shares]
    assert first["moe/entropy"] == pytest.approx(sum(entropies) / 2)
    assert first["moe/bias_range"] == 0
    assert second["moe/bias_range"] == pytest.approx(0.2, abs=1e-6), "some experts had more than the mean, some less"
    assert sorted(second["counts"]["moe/bias"]["0"]) == pytest.approx(
        sorted(math.copysign(0.1, B * S / E - tokens) if tokens != B * S / E else 0 for tokens in loads[0]), abs=1e-6
    )


@pytest.mark.parametrize(("interval", "steps"), [(2, [2, 4, 5]), (0, []), (10, [5])])
def test_counts_are_logged_at_their_interval_and_at_the_end(make_job, train, lines, interval, steps):
    model = model_of(SigmoidTopK(top_k=1))
    records = lines(train(make_job(model=model, steps=5, metrics=MetricsSection(counts_interval=interval), **SIZES)))
    assert [record["step"] for record in records if "counts" in record] == steps
    assert all("moe/entropy" in record for record in records), "what is made of them is logged every step"


@define(kw_only=True, slots=False)
class SkipFirst(TrainingHook):
    """Skips the update of step 1, and notes the bias after each step."""

    may_skip: ClassVar[bool] = True
    biases: list[float] = field(init=False, factory=list)

    def on_gradients(self, context):
        if context.step == 1:
            context.skip_update("to see the bias")

    def on_step_end(self, context):
        self.biases.append(context.model.layers["0"].ffn.router.bias.abs().max().item())


def test_a_skipped_update_leaves_the_bias_as_it_is(make_job, train):
    hook = SkipFirst()
    train(make_job(model=model_of(SigmoidTopK(top_k=1, bias_rate=0.25)), steps=2, **SIZES), hook)
    assert hook.biases == [0.0, 0.25]
