"""What a skip and a roll-back leave behind: optimizers, averages, routers, and runs that were cut off at any moment."""

from __future__ import annotations

import time
from typing import ClassVar

import pytest
import torch
from attrs import define, field
from spiked_runs import AT, Disturb, Note, Poison, make_spikes, watched

from forge_core import TrainingHook
from forge_plugin_ema import EMA
from forge_plugin_lion import Lion
from forge_plugin_moe import SigmoidTopK
from forge_plugin_muon import Muon
from forge_plugin_schedule_free import ScheduleFreeAdamW
from forge_testing import TinyAdamW
from forge_testing.laws import Interrupted, resumption_law
from forge_testing.outcomes import Die, PowerCut, Stop
from forge_testing.refusals import naming
from forge_testing.router_model import RoutedModel

BACK = AT + 3
"""Step at whose end the run goes back: the third spike in a row."""


test_resumption = resumption_law(
    Interrupted(
        "spikes",
        changes=lambda: watched(make_spikes(leave_out=5)),
        hooks=lambda: [Disturb()],
        interruptions=[
            # Between the second and the third spike; the newest checkpoint is in the middle of the row.
            [Die(step=AT + 2)],
            # The roll-back is requested.
            [Die(step=BACK)],
            # It is made, and nothing is saved since.
            [Die(step=BACK, event="rollback")],
            # Data are left out.
            [Die(step=BACK + 3, event="save")],
            # Before the first step after them.
            [Die(step=BACK + 6, event="begin")],
            # A run that was not stopped has no checkpoint of that step: it must not go back to it.
            [Stop(step=AT - 2)],
            [Stop(step=BACK + 6)],
        ],
    )
)


def test_what_a_roll_back_has_left_behind_is_remembered(spiked, spikes, train):
    def go(*hooks):
        note = Note()
        job = spiked(spikes(roll_back_to=2), checkpoint={"keep": 0})
        train(job, Disturb(at=(AT, AT + 10)), note, *hooks)
        return note.back

    with pytest.raises(PowerCut):
        go(Die(event="begin", step=AT + 8))  # after the save of step 30
    # The first left 20 and 25 behind; 35 is disturbed, so that 30 is the newest, and 15 the one before
    assert [tuple(pair) for pair in go()] == [(BACK, 15), (AT + 13, 15)]


def test_a_save_in_the_background_is_waited_for(spiked, spikes, train, monkeypatch):
    """Else it would be a matter of the disk's speed where the run goes back to."""
    from forge_core.checkpoint import manager

    def slowly(*args, write=manager.write_manifest):
        time.sleep(0.5)  # many steps here
        write(*args)

    monkeypatch.setattr(manager, "write_manifest", slowly)
    note = Note()
    checkpoint = {"async_save": True, "interval": 20}
    train(spiked(spikes(action="roll_back"), checkpoint=checkpoint), Disturb(), note)
    assert note.back == [(AT + 1, 20)]


def test_with_one_checkpoint_kept_a_bad_newest_one_is_not_gone_back_to(spiked, spikes, train):
    note = Note()
    with pytest.warns(UserWarning, match=naming("checkpoint", "skipped")):
        train(spiked(spikes(action="roll_back"), checkpoint={"keep": 1}, steps=AT + 3), Disturb(at=(20,)), note)
    assert note.back == []


@define(kw_only=True, slots=False)
class Compare(TrainingHook):
    """Compares the state after a roll-back with the one that the checkpoint was made of."""

    rolls_back: ClassVar[bool] = False
    compared: list = field(factory=list, init=False)

    def on_checkpoint_save(self, context):
        if context.step == AT - 4:
            self.saved = context.take_state()

    def on_rollback(self, context, step, reason):
        now, then = context.take_state(), self.saved
        own = ("hook:hooks.spikes", "hook:python.Compare")
        differ = [name for name in then.tensors if not torch.equal(now.tensors[name], then.tensors[name])]
        differ += [name for name in now.tensors if name not in then.tensors]
        extras = [{k: v for k, v in state.values["extras"].items() if k not in own} for state in (now, then)]
        assert extras[0] == extras[1]
        assert now.values["optimizer"] == then.values["optimizer"]
        self.compared.append((context.step, step, differ))


@pytest.mark.parametrize(
    "changes",
    [
        {"plugins": {"ema": EMA(decay=0.9)}},
        {"optimizer": ScheduleFreeAdamW(lr=1e-2)},
        {"optimizer": Muon()},
        {"model": RoutedModel(router=SigmoidTopK(bias_rate=0.1))},
    ],
    ids=["ema", "schedule-free", "muon", "router"],
)
def test_everything_goes_back(spiked, spikes, train, changes):
    compare = Compare()
    train(spiked(spikes(), steps=BACK + 5, **changes), Disturb(), compare)
    assert compare.compared == [(BACK, AT - 4, [])]


@define(kw_only=True, slots=False)
class Record(TrainingHook):
    """Keeps the gradients of updates that were made, the weights before all, and those after."""

    def on_train_begin(self, context):
        self.parameters = dict(context.model.named_parameters())
        self.first, self.made = self._copy(self.parameters), []

    def on_gradients(self, context):
        self.gradients = self._copy({name: parameter.grad for name, parameter in self.parameters.items()})

    def on_step_end(self, context):
        if not context.skipped:
            self.made.append(self.gradients)

    def on_train_end(self, context):
        self.last = self._copy(self.parameters)

    def _copy(self, tensors):
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.fixture
def recorded(spiked, spikes, train):
    """A run of 30 steps of which two were skipped."""

    def run(optimizer):
        record, hook = Record(), spikes()
        job = spiked(hook, steps=30, optimizer=optimizer, grad_clip_norm=0.0)
        train(job, Poison(at=(20, 26), factor=1e6), record)
        assert len(record.made) == 28
        return job, record

    return run


@pytest.mark.parametrize(
    "optimizer",
    [TinyAdamW(), Lion(lr=1e-3), Muon(), ScheduleFreeAdamW(lr=1e-2)],
    ids=lambda component: type(component).__name__,
)
def test_a_skipped_update_leaves_no_trace_in_the_optimizer(recorded, build, optimizer):
    """Weights are those of a new optimizer that is given only the updates that were made, to the bit.

    OLMo-core's first skipping AdamW kept its step at 0: without bias correction rates were 2.2 times what was written.
    """
    job, record = recorded(optimizer)
    run = build(job)
    with torch.no_grad():
        for item in run.parameters:
            item.parameter.copy_(record.first[item.name])
    for gradients in record.made:
        for item in run.parameters:
            item.parameter.grad = gradients[item.name].clone()
        run.optimizer.step()
    for item in run.parameters:
        assert torch.equal(item.parameter, record.last[item.name]), item.name


def test_adamw_is_that_of_torch_with_the_bias_corrected_by_the_updates_that_were_made(recorded):
    _, record = recorded(TinyAdamW(weight_decay=0.0))
    parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in record.first.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, eps=1e-5, weight_decay=0.0, fused=True)
    for gradients in record.made:
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        optimizer.step()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, record.last[name]), name
