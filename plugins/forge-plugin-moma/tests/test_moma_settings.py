"""What a job may say, what is refused by name, and what is logged."""

from __future__ import annotations

import math

import pytest
import torch
from moma_marked import Marked, Mixed

from forge_core.contracts.errors import ForgeError
from forge_core.data.loader import TrainLoader
from forge_core.engine.step import Stepper
from forge_core.job import MetricsSection
from forge_core.plugins.catalog import Catalog
from forge_plugin_compile import Compile
from forge_plugin_moe import MoE
from forge_plugin_moma import MoMa
from forge_plugin_text.packing import Isolate
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_plugin_vision import VisionLanguage, VisionPart, ViT
from forge_testing import tiny_job
from forge_testing.documents import RandomDocuments
from forge_testing.refusals import at, check_problems, naming, problems_of
from forge_testing.runs import advance, tiny_run, whole

GROUPS = {"text": 3, "image": 2, "video": 1}


def model_of(router, layers=2, **keys):
    ffn = MoE(experts=6, hidden=16, router=router, **keys)
    attention = GroupedQueryAttention(heads=2)
    return Marked(language=Transformer(dim=16, layers=layers, vocab_size=32, attention=attention, ffn=ffn))


def problems_with(folder, router, model=None, **changes):
    job = tiny_job(str(folder), Catalog.installed(), model=model or model_of(router), **changes)
    return problems_of(job)


ROUTER = "model.language.ffn.router"
REFUSED = {
    "no modality": (MoMa(experts={"text": 5, "smell": 1}), at(f"{ROUTER}.experts.smell", "text, image, video, sound")),
    "no experts": (MoMa(experts={"text": 6, "image": 0}), at(f"{ROUTER}.experts.image", 0, 1)),
    "no text": (MoMa(experts={"image": 6}), at(f"{ROUTER}.experts", "text")),
    "another number": (
        MoMa(experts={"text": 3, "image": 2}),
        at(f"{ROUTER}.experts", "text 3 + image 2 = 5", "6 experts"),
    ),
    "too many of a group": (MoMa(experts=GROUPS, top_k=2), at(f"{ROUTER}.top_k", "2 of the 1")),
    "too large a capacity": (
        MoMa(experts=GROUPS, choose="experts", capacity_factor=1.5),
        at(f"{ROUTER}.capacity_factor", "1.5 of the 1"),
    ),
    "a key of experts": (
        MoMa(experts=GROUPS, capacity_factor=1.0),
        at(f"{ROUTER}.capacity_factor", 'choose = "experts"'),
    ),
    "a key of tokens": (
        MoMa(experts=GROUPS, choose="experts", bias_rate=0.1),
        at(f"{ROUTER}.bias_rate", 'choose = "tokens"'),
    ),
    "another key of tokens": (
        MoMa(experts=GROUPS, choose="experts", normalise=True),
        at(f"{ROUTER}.normalise", 'choose = "tokens"'),
    ),
    "weights of 1": (MoMa(experts=GROUPS, normalise=True), at(f"{ROUTER}.normalise", 1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_by_name(tmp_path, name):
    router, expected = REFUSED[name]
    check_problems(problems_with(tmp_path, router), expected)


def test_images_need_experts_in_a_model_that_sees_them(tmp_path):
    vision = VisionPart(encoder=ViT(dim=8, layers=1, heads=2, patch=2, size=(4, 4)))

    def problems(**groups):
        language = model_of(MoMa(experts=groups)).language
        return problems_with(tmp_path, None, VisionLanguage(language=language, vision=vision))

    check_problems(problems(text=6), at("model.language.ffn.router.experts", "images"))
    assert problems(text=4, image=2) == problems(text=4, video=2) == []
    assert problems(text=4, sound=2) == [], "spectrograms are images to the encoder"


def test_experts_do_not_choose_among_isolated_documents(tmp_path):
    data = {"sources": (RandomDocuments(),), "packing": Isolate()}
    isolated = problems_with(tmp_path, MoMa(experts=GROUPS, choose="experts"), data=data)
    check_problems(isolated, at(f"{ROUTER}.choose", "experts"))
    assert problems_with(tmp_path, MoMa(experts=GROUPS), data=data) == []


def test_isolated_documents_of_a_dataset_are_refused_in_training_and_allowed_in_evaluation(tmp_path):
    router = tiny_run(tmp_path, model=model_of(MoMa(experts=GROUPS, choose="experts"))).model.layers["0"].ffn.router
    batch = {name: torch.zeros(1, 8, dtype=torch.int64) for name in ("input_ids", "document_ids")}
    router.eval()(torch.randn(1, 8, 16), batch)
    with pytest.raises(ForgeError, match=naming("documents")):
        router.train()(torch.randn(1, 8, 16), batch)


def test_a_capacity_is_shared_out_within_a_modality(tmp_path):
    """Each expert may compute the even share of its group: nothing is dropped of a row whose groups are even."""
    model = model_of(MoMa(experts={"text": 4, "image": 2}), layers=1, capacity_factor=1.0)
    run = tiny_run(tmp_path, model=model, seq_len=16)
    layer, ids = run.model.layers["0"].ffn, torch.tensor([[1] * 12 + [-1] * 4])
    run.context.auxiliary.begin_step(torch.tensor(16), 1, 1)
    layer.train().router.route = lambda logits, scores, batch, closed: (  # type: ignore[method-assign]
        torch.ones(1, 16, 1),
        torch.tensor([[0, 1, 2, 3] * 3 + [4, 5] * 2]).unsqueeze(-1),
    )
    layer(torch.randn(1, 16, 16), {"input_ids": ids})
    assert run.context.auxiliary.totals()["moe/dropped"] == 0


def test_what_is_logged(make_job, train, lines):
    def logged(router):
        job = make_job(
            model=model_of(router), data={"sources": (Mixed(),)}, seq_len=16, global_batch_size=8, micro_batch_size=2,
            steps=1, metrics=MetricsSection(counts_interval=1), job={"name": router.choose},
        )  # fmt: skip
        return lines(train(job))[0]

    record = logged(MoMa(experts=GROUPS, bias_rate=0.1))
    loads = [record["counts"]["moe/load"][layer] for layer in "01"]
    assert [sum(load) for load in loads] == [8 * 16] * 2
    for name, first, last in (("text", 0, 3), ("image", 3, 5), ("video", 5, 6)):
        parts = [load[first:last] for load in loads]
        assert record[f"moe/{name}/fullest_expert"] == pytest.approx(max(max(p) * len(p) / sum(p) for p in parts))
        assert record[f"moe/{name}/dead_experts"] == sum(p.count(0) for p in parts)
        assert record[f"moma/{name}/skipped"] == 0
    parts = [load[:3] for load in loads]
    entropies = [-sum(n / sum(p) * math.log(n / sum(p)) for n in p if n) / math.log(3) for p in parts]
    assert record["moe/text/entropy"] == pytest.approx(sum(entropies) / 2)
    assert record["moma/without_experts"] == 0
    record = logged(MoMa(experts={"text": 4, "image": 2}, choose="experts"))
    assert 0 < record["moma/text/skipped"] < 1
    assert 0 < record["moma/without_experts"] < 0.3, "those of videos"
    assert 0 < record["moma/auxiliary_accuracy"] < 1
    assert record["moma/auxiliary"] > 0
    assert record["moe/text/entropy"] > 0.99, "experts that choose are used alike"


LOSSES = {"sequence_balance": 1.0, "batch_balance": 1.0, "micro_batch_balance": 1.0}
TOKENS = {"bias_rate": 0.1, "normalise": True, "top_k": 2, **LOSSES}
EXPERTS = {"choose": "experts", "capacity_factor": 2.0}


@pytest.mark.parametrize("keys", [TOKENS, EXPERTS], ids=["tokens", "experts"])
def test_batches_of_text_alone_train_the_experts_of_text_alone(tmp_path, keys):
    model = model_of(MoMa(experts={"text": 4, "image": 2}, gumbel_noise=True, z_loss=1.0, **keys)).language
    run = tiny_run(tmp_path, model=model)
    stepper, loader = Stepper(run), TrainLoader(run.job, run.datasets, run.context)
    stepper.gradients(loader.next_step(), 0)
    loader.close()
    for item in run.parameters:
        grad = item.parameter.grad
        assert grad.isfinite().all(), item.name
        if ".experts." in item.name:
            assert (grad[:4].any(), grad[4:].any()) == (True, False), item.name


def test_the_bias_balances_each_group_by_itself(tmp_path):
    router = MoMa(experts={"text": 3, "image": 3}, bias_rate=0.25)
    run = tiny_run(tmp_path, model=model_of(router, layers=1), data={"sources": (Mixed(),)}, seq_len=16)
    advance(run, 1)
    load = run.context.auxiliary.counted("moe/chosen", 0)
    means = torch.stack([load[:3].mean(), load[3:].mean()]).repeat_interleave(3)
    assert means[0] > 1.5 * means[3] > 0, "text is the most"
    bias = run.model.layers["0"].ffn.router.bias.double()
    assert torch.equal(bias, 0.25 * (means - load).sign())


@pytest.mark.parametrize("which", ["sequence_balance", "batch_balance", "micro_batch_balance"])
def test_balance_losses_are_those_within_each_modality(tmp_path, which):
    """Each weighted by its share of the positions."""
    found = {}
    for weight in (0.0, 10.0):
        router = MoMa(experts={"text": 4, "image": 2}, init_std=0.5, **{which: weight})
        run = tiny_run(tmp_path, model=model_of(router, layers=1), data={"sources": (Mixed(),)}, precision="fp64")
        module, auxiliary = run.model.layers["0"].ffn.router, run.context.auxiliary
        ids = torch.tensor([[1, 2, -1, -1, -1, 3, 4, -2], [5, 6, 7, 8, 9, 10, 11, 12]])
        x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        load = torch.tensor([1.0, 2, 3, 4, 5, 1], dtype=torch.float64)
        if which == "batch_balance" and weight:
            module.balance.load.copy_(load)
        auxiliary.begin_step(torch.tensor(16), sequences=2, micro_batches=1)
        weights, chosen = module(x, {"input_ids": ids})
        [found[weight]] = torch.autograd.grad(weights.sum(), [module.weight])
    parameter = module.weight.detach().requires_grad_()
    scores = (x @ parameter.T).sigmoid()
    value = torch.zeros((), dtype=torch.float64)
    rows = range(2) if which == "sequence_balance" else [slice(None)]
    for row in rows:
        for members, first, size in (((ids >= 0)[row], 0, 4), ((ids == -1)[row], 4, 2)):
            if not members.any():
                continue
            p = scores[row][members][:, first : first + size]
            share = (p / p.sum(-1, keepdim=True)).mean(0)
            used = torch.bincount(chosen[row][members].flatten() - first, minlength=size).double()
            used = load[first : first + size] if which == "batch_balance" else used
            value = value + members.double().mean() / len(rows) * (used / used.mean() * share).sum()
    value.backward()
    torch.testing.assert_close(found[10.0] - found[0.0], 10 * parameter.grad, rtol=1e-6, atol=1e-9)
    assert auxiliary.totals()[f"moe/{which}"].item() == pytest.approx(value.item(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("choose", ["tokens", "experts"])
def test_blocks_compiled_in_one_graph_train_alike(tmp_path, choose):
    model = model_of(MoMa(experts=GROUPS, choose=choose, gumbel_noise=True, z_loss=0.1), layers=1)
    found = []
    for stages in ({}, {"compile": Compile(backend="eager")}):
        run = tiny_run(tmp_path, model=model, data={"sources": (Mixed(),)}, seq_len=16, parallel=stages)
        advance(run, 2)
        found.append({name: whole(tensor) for name, tensor in run.model.state_dict().items()})
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-4, atol=1e-5)
