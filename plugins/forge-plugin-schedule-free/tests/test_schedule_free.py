"""Schedule-Free optimizers against the package that they are built on, and where the average is taken."""

from __future__ import annotations

import copy

import pytest
import schedulefree
import torch
from attrs import frozen
from safetensors.torch import load_file

from forge_core.cli import main
from forge_core.contracts.components import SchedulerComponent
from forge_core.contracts.optimizer import HasEvaluationWeights
from forge_plugin_schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
from forge_testing.laws import Interrupted, resumption_law
from forge_testing.refusals import naming
from forge_testing.runs import tiny_run

COMPONENTS = [
    ScheduleFreeAdamW(lr=0.01, warmup_steps=3, weight_decay=0.1),
    ScheduleFreeAdamW(betas=(0.95, 0.99), foreach=False, weight_lr_power=1.0),
    ScheduleFreeSGD(lr=0.5, momentum=0.8, r=1.0),
]


def package(component, groups):
    kinds = {ScheduleFreeAdamW: schedulefree.AdamWScheduleFree, ScheduleFreeSGD: schedulefree.SGDScheduleFree}
    own = ("lr", "betas", "eps", "momentum", "warmup_steps", "r", "weight_lr_power", "foreach")
    options = {name: getattr(component, name) for name in own if hasattr(component, name)}
    return kinds[type(component)](groups, **options)


def draw(name, shape, step):
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * step)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("component", COMPONENTS, ids=lambda component: type(component).__name__)
def test_it_steps_and_averages_as_the_package(make_job, build, component):
    run = build(make_job(optimizer=component))
    twin = dict(copy.deepcopy(run.model).named_parameters())
    spared = ("norm", "bias", "embedding")
    decayed = [twin[p.name] for p in run.parameters if p.role not in spared]
    rest = [twin[p.name] for p in run.parameters if p.role in spared]
    theirs = package(
        component,
        [{"params": decayed, "weight_decay": component.weight_decay}, {"params": rest, "weight_decay": 0.0}],
    )
    theirs.train()
    for step in range(6):
        for item in run.parameters:
            item.parameter.grad = draw(item.name, item.parameter.shape, step).float()
            twin[item.name].grad = item.parameter.grad.clone()
        run.optimizer.step()
        theirs.step()
    assert all(torch.equal(item.parameter, twin[item.name]) for item in run.parameters)
    run.optimizer.eval()
    theirs.eval()
    assert all(torch.equal(item.parameter, twin[item.name]) for item in run.parameters)


def test_an_evaluation_leaves_no_trace(make_job, build):
    run = build(make_job(optimizer=COMPONENTS[0]))
    for step in range(2):
        for item in run.parameters:
            item.parameter.grad = draw(item.name, item.parameter.shape, step).float()
        run.optimizer.step()
    before = {item.name: item.parameter.detach().clone() for item in run.parameters}
    run.optimizer.eval()
    assert not all(torch.equal(item.parameter, before[item.name]) for item in run.parameters)
    run.optimizer.train()
    assert all(torch.equal(item.parameter, before[item.name]) for item in run.parameters)


@frozen(kw_only=True)
class Falling(SchedulerComponent):
    """Below the largest rate so far, which these optimizers remember."""

    def build(self, context):
        return lambda step, steps: 1.0 if step < 2 else 0.2


def average_of(summary):
    """The exported weights of a run."""
    path = summary.folder / "average.safetensors"
    assert main(["checkpoints", str(summary.folder), "export", "--out", str(path)]) == 0
    return {name: weight.tolist() for name, weight in load_file(path).items()}


def evaluated(component):
    return lambda: {"optimizer": component, "scheduler": Falling(), "eval": {"interval": 2}, "micro_batch_size": 2}


test_resumption = resumption_law(
    *(
        Interrupted(f"{type(component).__name__}{number}", changes=evaluated(component), also=average_of)
        for number, component in enumerate(COMPONENTS)
    )
)


def test_a_first_beta_of_zero_is_refused():
    with pytest.raises(ValueError, match=naming("first", "> 0")):
        ScheduleFreeAdamW(betas=(0.0, 0.9))


def test_a_job_knows_that_other_weights_are_evaluated(tmp_path):
    """By it, what brings weights of its own (`ema`) is refused when a job is checked."""
    for component in (ScheduleFreeAdamW(), ScheduleFreeSGD()):
        optimizer = tiny_run(tmp_path, optimizer=component).optimizer
        assert component.has_evaluation_weights
        assert isinstance(optimizer, HasEvaluationWeights)


@pytest.mark.parametrize(
    ("steps", "betas", "is_long"), [(300, (0.9, 0.999), True), (3001, (0.9, 0.999), False), (300, (0.95, 0.99), False)]
)
def test_an_average_that_spans_the_run_is_pointed_out(tmp_path, steps, betas, is_long):
    component = ScheduleFreeAdamW(betas=betas)
    run = tiny_run(tmp_path, optimizer=component, steps=steps)
    assert [what for what, _, _ in component.choices(run.context)] == ["betas"] * is_long
