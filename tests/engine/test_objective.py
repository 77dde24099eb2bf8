"""What a step optimises: the mean over the valid tokens of the global batch, however it is cut."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from forge_core.checkpoint.state import model_tensors
from forge_core.data.loader import TrainLoader
from forge_core.losses import CrossEntropy
from forge_testing import Numbers, TinyModel


def explicit_steps(run, steps):
    """The same training written out: one batch, an explicit mean over valid tokens, explicit clipping."""
    model = copy.deepcopy(run.model)
    decay = [p for n, p in model.named_parameters() if p.ndim > 1 and "embedding" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim == 1 or "embedding" in n]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-5)
    loader = TrainLoader(run.job, run.datasets, run.context)
    losses, norms = [], []
    for _ in range(steps):
        micro = loader.next_step()
        batch = {name: torch.cat([b[name] for b in micro]) for name in micro[0]}
        logits = model.head.logits(model(batch))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        norms.append(torch.cat([g.flatten() for g in gradients]).norm().item())
        for gradient in gradients:
            gradient *= min(1.0, run.job.train.grad_clip_norm / norms[-1])
        optimizer.step()
        losses.append(loss.item())
    loader.close()
    return model, losses, norms


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 8])
def test_accumulation_over_uneven_micro_batches_is_the_mean_over_valid_tokens(
    make_job, build, train, lines, catalog, micro_batch_size
):
    job = make_job(
        global_batch_size=8,
        micro_batch_size=micro_batch_size,
        precision="fp64",
        grad_clip_norm=0.5,
        data={"sources": (Numbers(ignored=7),)},
    )
    model, losses, norms = explicit_steps(build(job), job.train.steps)
    trained = {}

    from forge_core.contracts.components import TrainingHook

    class Keep(TrainingHook):
        def on_train_end(self, context):
            trained.update(model_tensors(context.model))

    records = lines(train(job, Keep()))
    assert [r["loss"] for r in records] == pytest.approx(losses, rel=1e-12)
    assert [r["grad_norm"] for r in records] == pytest.approx(norms, rel=1e-12)
    for name, tensor in model_tensors(model).items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-10, atol=1e-12)


def test_what_a_loss_adds_to_the_cross_entropy_is_trained_on_and_not_reported(make_job, train, lines):
    from forge_core.losses import CrossEntropy

    plain, penalised = (
        lines(train(make_job(loss=loss, micro_batch_size=2, job={"name": f"{number}"})))[0]
        for number, loss in enumerate([CrossEntropy(), CrossEntropy(z_loss=1.0)])
    )
    assert penalised["loss"] == plain["loss"]
    assert penalised["grad_norm"] != plain["grad_norm"]


def test_bf16_keeps_weights_gradients_norms_and_losses_in_float32(make_job, build):
    run = build(make_job(precision="bf16"))
    seen = {}
    embed = run.model.embed
    run.model.embed = lambda batch: seen.setdefault("carry", embed(batch))
    from forge_core.engine.step import Stepper

    loader = TrainLoader(run.job, run.datasets, run.context)
    stepper = Stepper(run)
    output, _ = stepper.gradients(loader.next_step(), 0)
    loader.close()
    assert seen["carry"][0].dtype == torch.bfloat16
    assert output.loss_sum.dtype == torch.float32
    assert stepper.norm().dtype == torch.float32
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in run.model.parameters()} == {torch.float32}


def test_a_step_in_which_every_label_is_ignored_changes_nothing_and_is_finite(make_job, build):
    run = build(make_job(precision="fp64"))
    from forge_core.engine.step import Stepper

    loader = TrainLoader(run.job, run.datasets, run.context)
    batches = loader.next_step()
    loader.close()
    for batch in batches:
        batch["labels"].fill_(-100)
    stepper = Stepper(run)
    _, sums = stepper.gradients(batches, 0)
    assert sums["loss_sum"].item() == 0
    assert sums["count"].item() == 0
    assert stepper.norm().item() == 0


def test_several_sources_report_their_own_loss_over_their_own_tokens(make_job, train, lines):
    from forge_core.contracts.components import TrainingHook

    class Tokens(TrainingHook):
        def on_step_begin(self, context):
            self.seen = getattr(self, "seen", [])
            valid = {"web": 0, "1": 0}
            for batch in context.batches:
                for source, labels in zip(batch["sources"], batch["labels"], strict=True):
                    valid[["web", "1"][source]] += int((labels != -100).sum())
            self.seen.append(valid)

    sources = (Numbers(name="web", weight=3.0, ignored=7), Numbers(start=500))
    hook = Tokens()
    records = lines(train(make_job(global_batch_size=8, micro_batch_size=2, data={"sources": sources}), hook))
    for record, tokens in zip(records, hook.seen, strict=True):
        weighted = sum(record[f"loss/source/{name}"] * count for name, count in tokens.items())
        assert record["loss"] == pytest.approx(weighted / sum(tokens.values()), rel=1e-6)


def test_a_source_may_be_named_like_a_term_of_the_loss(make_job, train, lines):
    sources = (Numbers(name="z_loss"), Numbers(name="uniform", start=500))
    loss = CrossEntropy(z_loss=1e-4, label_smoothing=0.1)
    terms = {"loss/z_loss", "loss/uniform"}
    [record, *_] = lines(train(make_job(global_batch_size=8, loss=loss, data={"sources": sources})))
    of_sources = {"loss/source/z_loss", "loss/source/uniform"}
    assert record.keys() >= terms | of_sources
    assert min(record[name] for name in of_sources) < record["loss"] < max(record[name] for name in of_sources)
    assert record["loss/z_loss"] > 0 < record["loss/uniform"]


def test_a_source_without_a_token_in_a_step_has_no_loss_in_it(make_job, train, lines):
    sources = (Numbers(name="often", weight=7.0), Numbers(name="rare"), Numbers(name="never", weight=0.0))
    records = lines(train(make_job(steps=8, global_batch_size=4, data={"sources": sources})))
    assert [record.keys() & {"loss/source/often", "loss/source/rare", "loss/source/never"} for record in records].count(
        {"loss/source/often", "loss/source/rare"}
    ) == 4
    assert all("loss/source/often" in record and "loss/source/never" not in record for record in records)


def test_frozen_parameters_stay_and_are_not_counted_in_the_norm(make_job, build, train):
    from forge_core.contracts.components import TrainingHook

    class Freeze(TrainingHook):
        def on_train_begin(self, context):
            context.model.head.weight.requires_grad_(False)
            self.before = context.model.head.weight.clone()

        def on_train_end(self, context):
            assert torch.equal(context.model.head.weight, self.before)
            self.checked = True

    hook = Freeze()
    train(make_job(), hook)
    assert hook.checked


def test_loss_falls(make_job, train, lines):
    records = lines(train(make_job(steps=60, global_batch_size=16, model=TinyModel(dim=32))))
    assert records[-1]["loss"] < 0.5 * records[0]["loss"]
