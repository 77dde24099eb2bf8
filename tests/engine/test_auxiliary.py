"""Auxiliary losses and module metrics, against the explicit sum."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forge_core.auxiliary import Auxiliary
from forge_core.contracts.errors import ForgeError
from forge_core.data.loader import TrainLoader
from forge_core.engine.step import Stepper, metrics
from forge_kit.nn.recomputing import Recomputing
from forge_testing import Numbers, PenalisedModel
from forge_testing.refusals import naming
from forge_testing.tiny_model import PENALTY


def explicit_gradients(run, batches):
    """The objective written out over the whole batch."""
    batch = {name: torch.cat([b[name] for b in batches]) for name in batches[0]}
    model, sums = run.model, {"token": 0.0, "sequence": 0.0, "layer": 0.0}
    carry = model.embed(batch)
    for penalised in model.layers.values():
        carry = penalised.layer(carry, batch)
        valid = (batch["labels"] != -100).unsqueeze(-1)
        sums["token"] += (carry[0].square() * valid).sum()
        sums["sequence"] += carry[0].mean(dim=1).square().sum()
        sums["layer"] += penalised.layer.down.weight.square().sum()
    logits = model.head.logits(model.finish(carry, batch))
    tokens = (batch["labels"] != -100).sum()
    means = {
        "aux/token": sums["token"] / tokens,
        "aux/sequence": sums["sequence"] / len(batch["labels"]),
        "aux/layer": sums["layer"],
    }
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    gradients = torch.autograd.grad(loss + PENALTY * sum(means.values()), list(model.parameters()))
    return loss.item(), {name: mean.item() for name, mean in means.items()}, gradients


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_gradients_and_metrics_equal_the_explicit_sum(make_job, build, micro_batch_size, recompute):
    model = PenalisedModel(recompute=recompute)
    data = {"sources": (Numbers(ignored=7),)}
    job = make_job(global_batch_size=8, micro_batch_size=micro_batch_size, precision="fp64", model=model, data=data)
    run = build(job)
    loader = TrainLoader(job, run.datasets, run.context)
    batches = loader.next_step()
    loader.close()
    loss, means, gradients = explicit_gradients(run, batches)
    _, sums = Stepper(run).gradients(batches, 0)
    found = {name: value.item() for name, value in metrics(sums).items()}
    assert found["loss"] == pytest.approx(loss, rel=1e-12), "the reported loss has no auxiliary part"
    for name, mean in means.items():
        assert found[name] == pytest.approx(mean, rel=1e-12), name
    assert found["aux/forwards.1"] == 8 / micro_batch_size, "recomputation does not count"
    for parameter, gradient in zip(run.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
@pytest.mark.parametrize("declared", [True, False])
def test_a_mean_over_examples_is_over_those_that_the_data_declare(make_job, build, micro_batch_size, declared):
    """Rows with 0, 1, 2, ... examples, each of which adds 3 to the sum; without the entry, a row is one."""
    job = make_job(global_batch_size=8, micro_batch_size=micro_batch_size)
    run = build(job)
    loader = TrainLoader(job, run.datasets, run.context)
    batches = loader.next_step()
    loader.close()
    if declared:
        for number, batch in enumerate(batches):
            batch["examples"] = number * micro_batch_size + torch.arange(micro_batch_size)
    run.model.norm.register_forward_hook(
        lambda *_: run.context.auxiliary.metric("threes", torch.tensor(84.0 / len(batches)), "example")
    )
    _, sums = Stepper(run).gradients(batches, 0)
    assert metrics(sums)["threes"].item() == pytest.approx(84 / (28 if declared else 8), rel=1e-6)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_a_mean_over_documents_is_over_those_of_each_row(make_job, build, micro_batch_size):
    """Row i has i + 1 documents; without ids, a row is one."""
    run = build(job := make_job(global_batch_size=8, micro_batch_size=micro_batch_size))
    loader = TrainLoader(job, run.datasets, run.context)
    batches = loader.next_step()
    loader.close()
    run.model.norm.register_forward_hook(
        lambda *_: run.context.auxiliary.metric("threes", torch.tensor(84.0 / len(batches)), "document")
    )
    stepper = Stepper(run)
    assert metrics(stepper.gradients(batches, 0)[1])["threes"].item() == pytest.approx(84 / 8, rel=1e-6)
    rows = torch.arange(8).split(micro_batch_size)
    positions = torch.arange(job.train.seq_len)
    for batch, numbers in zip(batches, rows, strict=True):
        batch["document_ids"] = 100 - torch.minimum(positions, numbers[:, None])
    assert metrics(stepper.gradients(batches, 0)[1])["threes"].item() == pytest.approx(84 / 36, rel=1e-6)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_the_largest_values_of_a_step_are_those_of_all_its_forward_passes(make_job, build, micro_batch_size):
    run = build(job := make_job(global_batch_size=8, micro_batch_size=micro_batch_size))
    loader = TrainLoader(job, run.datasets, run.context)
    auxiliary, stepper = run.context.auxiliary, Stepper(run)
    counter = auxiliary.counter("peak", 3, largest=True)
    seen: list[torch.Tensor] = []

    def see(_module, _inputs, output):
        seen.append(output.detach().double().amax((0, 1)) - 100)  # below zero, so that an empty one would be found
        counter.add(seen[-1])
        with Recomputing(auxiliary):
            counter.add(seen[-1] + 1000)

    run.model.norm.register_forward_hook(see)
    for step in range(2):  # the second one does not see the first one's
        seen.clear()
        stepper.gradients(loader.next_step(), step)
        assert torch.equal(auxiliary.counted("peak", 3), torch.stack(seen).amax(0))
        assert len(seen) == 8 // micro_batch_size
    loader.close()
    auxiliary.forget_counted_unless(torch.tensor(False))
    assert auxiliary.counted("peak", 3).abs().max() == 0


def test_the_largest_values_of_one_of_several_runs_are_refused_by_name(make_job, build):
    """Their sums are known over all runs, and no stage compares the largest values of one with those of others."""
    run = build(job := make_job())
    loader = TrainLoader(job, run.datasets, run.context)
    batches = loader.next_step()
    loader.close()
    counter = run.context.auxiliary.counter("peak", 3, largest=True)
    run.model.norm.register_forward_hook(lambda *_: counter.add(torch.ones(2)))
    stepper = Stepper(run)
    stepper._runs = 2
    with pytest.raises(ForgeError, match=naming("peak", 3, 2)):
        stepper.gradients(batches, 0)


def test_evaluation_neither_counts_nor_penalises(make_job, build):
    job = make_job(model=PenalisedModel())
    run = build(job)
    loader = TrainLoader(job, run.datasets, run.context)
    batches = loader.next_step()
    loader.close()
    stepper = Stepper(run)
    stepper.gradients(batches, 0)
    before = {name: value.item() for name, value in run.context.auxiliary.totals().items()}
    run.executor.evaluate(batches)
    assert {name: value.item() for name, value in run.context.auxiliary.totals().items()} == before


def test_a_recomputation_within_another_does_not_end_it():
    auxiliary = Auxiliary(torch.device("cpu"))
    auxiliary.begin_step(torch.tensor(1), sequences=1, micro_batches=1)
    with Recomputing(auxiliary):
        with Recomputing(auxiliary):
            auxiliary.metric("seen", torch.ones(()))
        auxiliary.metric("seen", torch.ones(()))
    auxiliary.metric("seen", torch.ones(()))
    assert auxiliary.totals()["seen"] == 1


def test_in_a_pipeline_a_metric_that_comes_after_the_first_step_is_named(make_job, build, monkeypatch):
    """Its ranks agree once on the names of all of them. Here the only rank is the whole pipeline."""
    monkeypatch.setattr("forge_core.parallel.mesh.pipeline_group", lambda mesh: torch.distributed.group.WORLD)
    job = make_job()
    run = build(job)
    names = ["early"]
    run.model.norm.register_forward_hook(
        lambda *_: [run.context.auxiliary.metric(name, torch.ones(())) for name in names] and None
    )
    loader = TrainLoader(job, run.datasets, run.context)
    batches = loader.next_step()
    loader.close()
    stepper = Stepper(run)
    for step in range(2):
        assert "early" in metrics(stepper.gradients(batches, step)[1])
    names.append("late")
    with pytest.raises(ForgeError, match=naming("late", "pipeline", "first")):
        stepper.gradients(batches, 2)
