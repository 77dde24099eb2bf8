"""What trains in each stage, and nothing else, in one process; exact under resume; and errors that the check finds."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import ClassVar

import pytest
import torch
from attrs import define, frozen
from staged import LAST_STEPS, SETTINGS, STAGES, run, selected

import forge_plugin_freeze.audit as audit
from forge_core import CheckpointError, ForgeError, SchedulerComponent, TrainingHook
from forge_core.contracts.components import ParameterGroup
from forge_plugin_adamw import AdamW
from forge_plugin_ema import EMA
from forge_plugin_freeze import Freeze, Stage
from forge_plugin_freeze.audit import BITS, digest
from forge_plugin_lion import Lion
from forge_plugin_moe import SigmoidTopK
from forge_plugin_muon import Muon
from forge_plugin_schedule_free import ScheduleFreeAdamW
from forge_plugin_soap import SOAP
from forge_testing import RoutedModel, TinyAdamW
from forge_testing.laws import Interrupted, resumption_law
from forge_testing.outcomes import Stop
from forge_testing.refusals import naming

OPTIMIZERS = {
    "adamw": AdamW(lr=1e-2),
    "muon": Muon(),
    "lion": Lion(lr=1e-2),
    "soap": SOAP(lr=1e-2),
    "schedule_free": ScheduleFreeAdamW(lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_a_stage_names_trains_and_nothing_else(tmp_path, name):
    outcome = run(tmp_path, optimizer=OPTIMIZERS[name], precision="fp32")
    wanted = selected(outcome)
    assert [set(step.gradients) for step in outcome.steps] == wanted
    assert [set(step.state) for step in outcome.steps] == list(accumulate(wanted, set.union))
    for step, names in zip(outcome.steps, wanted, strict=True):
        assert step.changed <= names
    for number in LAST_STEPS:  # SOAP does not move a matrix in the first
        assert outcome.steps[number - 1].changed == wanted[number - 1]


def test_the_rest_of_the_norm_is_not_clipped_by_what_is_frozen(tmp_path):
    """The gradient norm of a stage is that of its own gradients."""
    everything = run(tmp_path, "all", stages=(Stage(),), steps=1)
    part = run(tmp_path, "part", stages=(Stage(train=("head.*",)),), steps=1)
    assert 0 < part.steps[0].norm < everything.steps[0].norm


def test_a_frozen_part_has_no_weight_decay(tmp_path):
    outcome = run(tmp_path, stages=(Stage(train=("layers.1.*",)),), optimizer=TinyAdamW(weight_decay=10.0))
    assert not [name for step in outcome.steps for name in step.changed if not name.startswith("layers.1.")]


def test_rates_of_parts_are_those_of_the_groups(tmp_path):
    """A stage trains with the rate of the optimizer's table for each part."""

    def change(**rates):
        groups = tuple(ParameterGroup(match=f"{part}.*", lr=lr) for part, lr in rates.items())
        optimizer = AdamW(groups=groups, weight_decay=0.0)
        after = run(
            tmp_path, "after", stages=(Stage(train=("head.*", "norm.*")),), steps=1, optimizer=optimizer
        ).weights
        before = run(tmp_path, "before", stages=(Stage(train=("embedding.*",)),), steps=1).weights
        return {part: (after[f"{part}.weight"] - before[f"{part}.weight"]).abs().max().item() for part in rates}

    assert change(head=1e-3, norm=1e-5) == pytest.approx({"head": 1e-3, "norm": 1e-5}, rel=1e-2)


# --- resume --------------------------------------------------------------------------------------------------------


test_resumption = resumption_law(
    Interrupted(
        "stages",
        changes=lambda: {**SETTINGS, "plugins": {"freeze": Freeze(stages=STAGES), "ema": EMA()}},
        interruptions=[[Stop(step=1)], [Stop(step=2)], [Stop(step=5)]],  # in the middle of a stage, and at borders
        ignored_metrics=["freeze/stage", "freeze/changed"],  # of the first step of a stage, and of a process
    )
)


def test_other_stages_are_another_run(tmp_path):
    run(tmp_path, hooks=[Stop(step=2)])
    with pytest.raises(CheckpointError, match=r"plugins.freeze.stages"):
        run(tmp_path, stages=(*STAGES[:1], Stage(train=("norm.*",), steps=2), *STAGES[2:]))


# --- the check -----------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Faulty(TinyAdamW):
    """An optimizer that does something wrong to the parameters whose names begin with `prefix`."""

    fault: str
    prefix: str
    step: int = 1
    weight_decay: float = 0.0

    def build(self, context, parameters):
        optimizer = FaultyAdamW(parameters.groups(self.weight_decay), lr=self.lr)
        optimizer.component = self
        return optimizer

    def training_hooks(self, job):
        return [Fault(component=self)]


@define(kw_only=True, slots=False)
class Fault(TrainingHook):
    """Faults in gradients; as a component's hook, it comes before those of plugins."""

    component: Faulty

    def on_gradients(self, context):
        for parameter in affected(context.optimizer, self.component.prefix):
            if self.component.fault == "gradient":
                parameter.grad = torch.zeros_like(parameter)
            elif self.component.fault == "none":
                parameter.grad = None
            elif self.component.fault == "zero" and context.step <= self.component.step and parameter.grad is not None:
                parameter.grad.zero_()


class FaultyAdamW(torch.optim.AdamW):
    component: Faulty
    calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        own = affected(self, self.component.prefix)
        if self.component.fault == "deaf":
            for parameter in own:
                parameter.grad = None
        super().step()
        if self.component.fault == "writes" and self.calls == self.component.step:
            for parameter in own:
                last = parameter.view(-1)[-1]
                last.copy_(torch.nextafter(last, last + 1))


def affected(optimizer, prefix):
    pairs = [pair for group in optimizer.param_groups for pair in zip(group["names"], group["params"], strict=True)]
    return [parameter for name, parameter in pairs if name.startswith(prefix)]


@pytest.mark.parametrize(("step", "name"), [(1, "embedding.weight"), (5, "norm.bias")])
def test_one_bit_of_a_frozen_weight_ends_the_run(tmp_path, step, name):
    with pytest.raises(ForgeError, match=naming(name, "changed")):
        run(tmp_path, optimizer=Faulty(fault="writes", prefix=name, step=step))


def test_a_gradient_of_a_frozen_weight_ends_the_run(tmp_path):
    with pytest.raises(ForgeError, match=naming("embedding.weight", "gradient")):
        run(tmp_path, optimizer=Faulty(fault="gradient", prefix="embedding"))


def test_a_part_without_a_gradient_ends_the_run_after_its_first_step(tmp_path):
    with pytest.raises(ForgeError, match=naming("step 1", "'head.*'", "no gradient")):
        run(tmp_path, optimizer=Faulty(fault="none", prefix="head"))


def test_what_goes_on_is_no_sign_that_something_begins(tmp_path):
    """`*` trains what it trained before; the part that is new has no gradient all the same."""
    stages = (Stage(freeze=("layers.0.*",), steps=2), Stage())
    with pytest.raises(ForgeError, match=naming("step 3", "'*'", "no gradient")):
        run(tmp_path, stages=stages, optimizer=Faulty(fault="none", prefix="layers.0"))


@pytest.mark.parametrize(("fault", "reason"), [("zero", "gradient of 0"), ("deaf", "change")])
def test_a_part_that_stays_as_it_is_ends_the_run_when_patience_ends(tmp_path, fault, reason):
    with pytest.raises(ForgeError, match=naming("steps 1 to 3", "'head.*'", reason)):
        run(
            tmp_path,
            stages=(Stage(train=("head.*",)),),
            optimizer=Faulty(fault=fault, prefix="head", step=9),
            patience=3,
        )


def test_a_gradient_of_zero_and_a_rate_of_zero_are_no_alarm_at_first(tmp_path):
    """A part whose data comes later, and the first step of a warm-up."""
    warm = run(tmp_path, "warm", scheduler=FromZero())
    assert not warm.steps[0].changed
    assert warm.steps[1].changed == selected(warm)[1]
    late = run(tmp_path, "late", optimizer=Faulty(fault="zero", prefix="", step=1))
    assert not late.steps[0].changed
    assert late.steps[1].changed == selected(late)[1]


def test_a_skipped_update_is_not_taken_for_one(tmp_path):
    outcome = run(tmp_path, hooks=[Skip()])
    assert not outcome.steps[0].changed
    assert outcome.steps[1].changed == selected(outcome)[1]
    with pytest.raises(ForgeError, match="frozen parameters"):
        run(tmp_path, "again", hooks=[Skip()], optimizer=Faulty(fault="writes", prefix="embedding", step=1))


@frozen(kw_only=True)
class FromZero(SchedulerComponent):
    """A warm-up whose first step has a rate of 0."""

    def build(self, context):
        return lambda step, total: min(step / 2, 1.0)


@define(kw_only=True, slots=False)
class Skip(TrainingHook):
    """Leaves out the first update."""

    may_skip: ClassVar[bool] = True

    def on_gradients(self, context):
        if context.step == 1:
            context.skip_update("test")


# --- digests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_every_single_bit_changes_the_digest(dtype):
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    bits = tensor.view(BITS[tensor.element_size()])
    before = digest(tensor)
    for place in range(bits.numel()):
        for bit in range(8 * tensor.element_size() - 1):
            bits.view(-1)[place] ^= 1 << bit
            assert digest(tensor) != before
            bits.view(-1)[place] ^= 1 << bit
    assert digest(tensor) == before


def test_signs_of_several_elements_do_not_cancel():
    """The highest bit alone would: 2**63 twice is 0 modulo 2**64."""
    tensor = torch.ones(6, dtype=torch.float64)
    flipped = torch.tensor([-1.0, -1.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    assert digest(tensor) != digest(flipped)


def test_a_digest_reads_long_tensors_in_order(monkeypatch):
    monkeypatch.setattr(audit, "CHUNK", 7)
    tensor = torch.arange(20.0)
    swapped = torch.cat([tensor[7:14], tensor[:7], tensor[14:]])
    assert digest(tensor) != digest(swapped)
    assert digest(tensor[::2]) == digest(tensor[::2].clone())


# --- modules that change their own buffers -------------------------------------------------------------------------


@define(kw_only=True, slots=False)
class Biases(TrainingHook):
    """The biases of the routers after each step."""

    def __attrs_post_init__(self):
        self.steps = []

    def on_step_end(self, context):
        self.steps.append({n: b.clone() for n, b in context.model.named_buffers() if n.endswith("router.bias")})


def test_the_bias_of_a_frozen_router_stays_and_that_of_a_trained_one_moves(tmp_path):
    biases = Biases()
    stages = (Stage(train=("layers.0.*",), steps=2), Stage(train=("layers.1.*",)))
    model = RoutedModel(router=SigmoidTopK(bias_rate=0.1))
    run(tmp_path, stages=stages, hooks=[biases], model=model, steps=4)
    first, second = sorted(biases.steps[0])
    states = [dict.fromkeys((first, second), torch.zeros(4).double()), *biases.steps]
    moved = [{name: not torch.equal(now[name], before[name]) for name in now} for before, now in pairwise(states)]
    assert moved == 2 * [{first: True, second: False}] + 2 * [{first: False, second: True}]
