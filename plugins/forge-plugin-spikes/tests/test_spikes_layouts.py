"""Decisions are the same on every rank, and those of one process."""

from __future__ import annotations

import pytest
import torch
from attrs import define
from spiked_runs import AT, Note

from forge_core import TrainingHook
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing.layouts import LAYOUTS
from forge_testing.processes import run_on_ranks

NAMES = ("fsdp2", "tp2", "pp2")


@define(kw_only=True, slots=False)
class Scale(TrainingHook):
    """Scales all weights at the end of a step: each rank its own part, whatever the layout."""

    @torch.no_grad()
    def on_step_end(self, context):
        if context.step == AT:
            for parameter in context.model.parameters():
                getattr(parameter, "to_local", lambda parameter=parameter: parameter)().mul_(20)


@pytest.fixture
def run(spiked, spikes, train, lines, catalog):
    """Losses by step, and what the hook decided and remembers."""

    def go(name, **changes):
        hook, note = spikes(), Note()
        model = Transformer(vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=2))
        job = spiked(hook, name, model=model, global_batch_size=8, steps=AT + 8, **changes)
        records = lines(train(job, Scale(), note))
        skipped = [record["step"] for record in records if record.get("skipped")]
        return {record["step"]: record["loss"] for record in records}, skipped, note.back, hook.state_dict()

    return go


def test_ranks_decide_alike_and_as_one_process_does(run, catalog):
    def on_rank(rank):
        return {
            name: run(
                name,
                parallel=LAYOUTS[name].stages(catalog),
                micro_batch_size=LAYOUTS[name].micro_batch_size,
            )
            for name in NAMES
        }

    losses, skipped, back, _ = run("alone", micro_batch_size=2)
    assert (skipped, back) == ([AT + 1, AT + 2, AT + 3], [(AT + 3, AT - 4)])
    first, second = run_on_ranks(2, on_rank)
    for name in NAMES:
        assert first[name][1:3] == (skipped, back)
        assert first[name][2:] == second[name][2:], "the other rank has decided, and remembers, the same to the bit"
        assert first[name][0] == pytest.approx(losses, rel=1e-3)
