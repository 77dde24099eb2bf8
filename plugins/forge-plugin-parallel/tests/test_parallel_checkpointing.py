"""Stage `activation_checkpointing`: less memory, same numbers."""

from __future__ import annotations

import pytest
import torch
from attrs import frozen

from forge_core.contracts.components import ParallelComponent
from forge_core.contracts.errors import JobError
from forge_core.contracts.layout import Layout
from forge_core.data.loader import TrainLoader
from forge_core.engine.step import Stepper
from forge_kit.tools.commands import parse_component
from forge_plugin_compile import Compile
from forge_plugin_parallel import ActivationCheckpointing, TensorParallel
from forge_testing import SplittableModel, TinyModel, job_problems
from forge_testing.refusals import at, check_problems

MODES = [ActivationCheckpointing(), ActivationCheckpointing(mode="selective"), ActivationCheckpointing(every=2)]


@frozen(kw_only=True)
class Counting(TinyModel):
    """Attaches an auxiliary loss in each layer and counts how often a layer is computed."""

    def build(self, context):
        model = super().build(context)
        model.passes = 0
        for layer in model.layers.values():
            forward = layer.forward

            def counted(carry, batch, forward=forward):
                model.passes += 1
                (x,) = forward(carry, batch)
                return (context.auxiliary.attach(x, x.square().sum(), unit="token", name="size", weight=0.1),)

            layer.forward = counted
        return model


@pytest.mark.parametrize("stage", MODES, ids=["full", "selective", "every second"])
def test_the_curve_is_the_same_dropout_and_auxiliary_losses_included(make_job, build, stage):
    found = []
    for stages in ({}, {"activation_checkpointing": stage}):
        run = build(make_job(model=Counting(layers=4, dropout=0.3), parallel=stages))
        loader = TrainLoader(run.job, run.datasets, run.context)
        output, sums = Stepper(run).gradients(loader.next_step(), 0)
        loader.close()
        gradients = {item.name: item.parameter.grad for item in run.parameters}
        found.append(
            (output.loss_sum, {name: value.item() for name, value in sums.items()}, gradients, run.model.passes)
        )
    (loss, sums, gradients, once), (same_loss, same_sums, same_gradients, again) = found
    assert torch.equal(loss, same_loss)
    assert sums == same_sums, "metrics count once, though layers are computed again"
    assert all(torch.equal(gradients[name], same_gradients[name]) for name in gradients)
    assert again - once == (2 if stage.every == 2 else 4) * (once // 4)


def test_without_gradients_nothing_is_kept_or_computed_again(make_job, build):
    run = build(make_job(model=Counting(layers=2), parallel={"activation_checkpointing": ActivationCheckpointing()}))
    with torch.no_grad():
        run.model({"input_ids": torch.zeros(1, 4, dtype=torch.long)})
    assert run.model.passes == 2


def test_more_than_there_are_layers_is_refused(make_job):
    problems = ActivationCheckpointing(every=3).problems(make_job(model=TinyModel(layers=2)), Layout())
    check_problems(problems, at("every", 3, "2 layers"))


def test_an_unknown_mode_is_refused(catalog):
    with pytest.raises(JobError, match="mode"):
        parse_component({"type": "activation_checkpointing", "mode": "ful"}, "x", ParallelComponent, catalog)


@pytest.mark.parametrize(
    ("mode", "degree", "refused"), [("full", 2, True), ("selective", 2, False), ("full", 1, False)]
)
def test_full_recomputation_of_compiled_blocks_under_tensor_parallel_is_refused(make_job, mode, degree, refused):
    stages = {"activation_checkpointing": ActivationCheckpointing(mode=mode), "compile": Compile()}
    stages["tp"] = TensorParallel(degree=degree)
    problems = job_problems(make_job(model=SplittableModel(), parallel=stages), ranks=degree)
    assert [problem for problem in problems if "activation_checkpointing.mode" in problem] == problems
    assert bool(problems) == refused
