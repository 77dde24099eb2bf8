"""Faults that make a run spike."""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import define, field

from forge_core import TrainingHook
from forge_plugin_resilience.spikes import Spikes
from forge_testing import tiny_job

AT = 24
"""Step after which weights are disturbed."""
STEPS = 40


def make_spikes(**keys):
    """A hook that judges once it has 16 values. Losses fall by half in this time, so the threshold is high."""
    return Spikes(**{"window": 16, "warmup_steps": 0, "threshold": 12.0, "leave_out": 3, **keys})


def watched_job(folder, catalog, hook, name="run", **changes):
    """A job that saves every five steps, with the hook if there is one."""
    return tiny_job(str(folder), catalog, job={"name": name, "output": str(folder)}, **watched(hook, **changes))


def watched(hook, **changes):
    """The settings of `watched_job`."""
    checkpoint = {"interval": 5, "interval_minutes": 0, **changes.pop("checkpoint", {})}
    hooks = {"spikes": hook} if hook else {}
    return {"steps": STEPS, "gc_interval": 0, "checkpoint": checkpoint, "hooks": hooks, **changes}


@define(kw_only=True, slots=False)
class Disturb(TrainingHook):
    """Adds noise to all weights at the end of some steps, as a bad update would."""

    at: tuple[int, ...] = (AT,)
    size: float = 4.0

    @torch.no_grad()
    def on_step_end(self, context):
        if context.step in self.at:
            generator = torch.Generator().manual_seed(context.step)
            for parameter in context.model.parameters():
                parameter.add_(self.size * torch.randn(parameter.shape, generator=generator))


@define(kw_only=True, slots=False)
class Poison(TrainingHook):
    """Makes gradients at some steps as large as said: infinite ones, say."""

    at: tuple[int, ...]
    factor: float = torch.inf

    def on_step_begin(self, context):
        if context.step in self.at:
            self.handle = context.model.head.weight.register_hook(lambda gradient: gradient * self.factor)

    def on_step_end(self, context):
        if context.step in self.at:
            self.handle.remove()


@define(kw_only=True, slots=False)
class Note(TrainingHook):
    """Notes roll-backs as (step, step gone back to)."""

    rolls_back: ClassVar[bool] = False
    back: list = field(factory=list, init=False)

    def on_rollback(self, context, step, reason):
        self.back.append((context.step, step))
