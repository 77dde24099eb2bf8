"""Decisions are the same on every rank, and those of one process."""

from __future__ import annotations

import pytest
import torch
from attrs import define
from spiked_runs import AT, Note, make_spikes, watched_job

from forge_core import Trainer, TrainingHook
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing.catalogs import installed
from forge_testing.laws import Case, layout_law
from forge_testing.outcomes import metrics_of


@define(kw_only=True, slots=False)
class Scale(TrainingHook):
    """Scales all weights at the end of a step: each rank its own part, whatever the layout."""

    @torch.no_grad()
    def on_step_end(self, context):
        if context.step == AT:
            for parameter in context.model.parameters():
                getattr(parameter, "to_local", lambda parameter=parameter: parameter)().mul_(20)


def decisions(folder, changes):
    """Losses by step, the skipped steps, roll-backs, and what the hook remembers."""
    hook, note = make_spikes(), Note()
    model = Transformer(vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=2))
    sizes = {"global_batch_size": 8, "steps": AT + 8, "micro_batch_size": 2}
    job = watched_job(folder, installed(), hook, model=model, **sizes | changes)
    summary = Trainer(job, hooks=[Scale(), note], catalog=installed(), echo=lambda text: None).run()
    records = [record for record in metrics_of(summary) if "loss" in record]
    skipped = [record["step"] for record in records if record.get("skipped")]
    return {record["step"]: record["loss"] for record in records}, skipped, note.back, hook.state_dict()


def alike_and_as_one_process(ranks, alone):
    losses, skipped, back, _ = alone
    assert (skipped, back) == ([AT + 1, AT + 2, AT + 3], [(AT + 3, AT - 4)])
    first, second = ranks
    assert first[1:3] == (skipped, back)
    assert first[2:] == second[2:], "the other rank has decided, and remembers, the same to the bit"
    assert first[0] == pytest.approx(losses, rel=1e-3)


test_layouts = layout_law(Case("spikes", observe=decisions, compare=alike_and_as_one_process, layouts=("fsdp2", "pp2")))
