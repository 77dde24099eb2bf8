"""The average against its closed form, and where it is taken."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from attrs import define, frozen
from safetensors.torch import load_file

from forge_core.cli import main
from forge_core.config.rules import check_rules
from forge_core.contracts.components import OptimizerComponent, TrainingHook
from forge_core.contracts.errors import ForgeError
from forge_core.engine.build import build_context, build_run
from forge_core.plugins.catalog import Catalog
from forge_plugin_checkpoints import Parts
from forge_plugin_ema import EMA
from forge_plugin_muon import Muon
from forge_plugin_parallel import FSDP
from forge_testing import TinyAdamW, tiny_job
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import naming


@define(kw_only=True, slots=False)
class Keep(TrainingHook):
    """The weights after each step, and what is evaluated."""

    def __attrs_post_init__(self):
        self.weights, self.seen = [], []  # no fields: those would be state

    def on_train_begin(self, context):
        self._note(context)

    def on_step_end(self, context):
        self._note(context)

    def _note(self, context):
        self.weights.append({name: p.detach().clone() for name, p in context.model.named_parameters()})


def closed_form(weights, decays):
    """Σ w_t (1 - d_t) Π_{u>t} d_u, and what is left of the initial weights."""
    shares = [math.prod(decays), *((1 - d) * math.prod(decays[n + 1 :]) for n, d in enumerate(decays))]
    assert sum(shares) == pytest.approx(1)
    return {name: sum(share * w[name] for share, w in zip(shares, weights, strict=True)) for name in weights[0]}


def exported(folder, tmp_path, name="out"):
    path = tmp_path / f"{name}.safetensors"
    assert main(["checkpoints", str(folder), "export", "--out", str(path)]) == 0
    return load_file(path)


@pytest.mark.parametrize(
    ("ema", "decays"),
    [
        (EMA(decay=0.75, warmup=False), [0.75] * 4),
        (EMA(decay=0.2), [0.1, 2 / 11, 0.2, 0.2]),
    ],
)
def test_what_is_exported_is_the_closed_form(make_job, train, tmp_path, ema, decays):
    keep = Keep()
    summary = train(make_job(plugins={"ema": ema}), keep)
    expected = closed_form(keep.weights, decays)
    for name, weight in exported(summary.folder, tmp_path).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7, msg=name)


def test_evaluation_sees_the_average_and_training_never_does(make_job, train, lines):
    plain = train(make_job(job={"name": "plain"}, eval={"interval": 1}))
    averaged = train(make_job(job={"name": "averaged"}, eval={"interval": 1}, plugins={"ema": EMA(decay=0.9)}))
    assert [record["loss"] for record in lines(averaged)] == [record["loss"] for record in lines(plain)]
    assert averaged.evaluation["eval/loss"] != plain.evaluation["eval/loss"]


def test_another_run_starts_from_the_average(make_job, train, tmp_path):
    ended = train(make_job(plugins={"ema": EMA(decay=0.5)}))
    keep = Keep()
    load = Parts(path=str(ended.folder))
    train(make_job(steps=1, job={"name": "next"}, checkpoint={"load": load}), keep)
    for name, weight in exported(ended.folder, tmp_path).items():
        assert torch.equal(weight, keep.weights[0][name])


def test_a_parameter_that_trains_later_is_averaged_from_then_on(make_job, build):
    run = build(make_job(plugins={"ema": EMA(decay=0.5, warmup=False)}))
    first, late = run.parameters[0].parameter, run.parameters[1].parameter
    late.requires_grad_(False)
    first.grad = torch.ones_like(first)
    run.optimizer.step()
    assert late not in run.optimizer.evaluation_weights()
    late.requires_grad_(True)
    before = late.detach().clone()
    late.grad = torch.ones_like(late)
    run.optimizer.step()
    torch.testing.assert_close(run.optimizer.evaluation_weights()[late], (before + late.detach()) / 2)


def test_on_two_ranks_the_average_is_that_of_one(tmp_path, catalog):
    def average(rank, stages):
        job = tiny_job(
            str(tmp_path), catalog, optimizer=Muon(ns_dtype="fp32"), plugins={"ema": EMA(decay=0.9)}, parallel=stages
        )
        run = build_run(job, build_context(job, catalog, None))
        for _ in range(3):
            for item in run.parameters:
                item.parameter.grad = torch.ones_like(item.parameter)
            run.optimizer.step()
        found = run.optimizer.evaluation_weights()
        return {item.name: whole(found[item.parameter]) for item in run.parameters}

    (expected,) = run_on_ranks(1, lambda rank: average(rank, {}))
    for found in run_on_ranks(2, lambda rank: average(rank, {"fsdp": FSDP()})):
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def test_an_optimizer_that_averages_itself_is_refused(make_job, build):
    with pytest.raises(ForgeError, match=naming("plugins.ema", "Averager")):
        build(make_job(optimizer=AveragerComponent(), plugins={"ema": EMA()}))


class Averager(torch.optim.SGD):
    def eval(self): ...

    def train(self): ...

    def evaluation_weights(self):
        return {}

    def load_evaluation_weights(self, weights): ...


@frozen(kw_only=True)
class AveragerComponent(OptimizerComponent):
    def build(self, context, parameters):
        return Averager(parameters.groups(0.0), lr=0.1)


@frozen(kw_only=True)
class Averaged(TinyAdamW):
    """Stands for an optimizer with weights of its own for evaluation."""

    has_evaluation_weights: ClassVar[bool] = True


def test_a_job_whose_optimizer_evaluates_other_weights_is_refused_when_it_is_checked(tmp_path):
    catalog = Catalog.installed()
    for optimizer, paths in ((TinyAdamW(), []), (Averaged(), ["plugins.ema"])):
        job = tiny_job(str(tmp_path), catalog, optimizer=optimizer, plugins={"ema": EMA()})
        assert [problem.path for problem in check_rules(job, catalog)] == paths
