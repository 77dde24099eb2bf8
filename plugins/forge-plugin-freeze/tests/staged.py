"""Runs in stages, and what each of their steps did to which parameter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor

from forge_core import Trainer, TrainingHook
from forge_plugin_freeze import Freeze, Stage
from forge_testing import SplittableModel, tiny_job
from forge_testing.catalogs import installed
from forge_testing.runs import whole_tensors

STAGES = (
    Stage(train=("layers.1.*", "head.*"), steps=2),
    Stage(train=("embedding.*", "layers.0.*"), steps=2),
    Stage(train=("head.*",), steps=1),  # nothing before it trains
    Stage(),
)
STEPS = 7
LAST_STEPS = (2, 4, 5, STEPS)
SETTINGS: dict[str, Any] = {
    "model": SplittableModel(),
    "precision": "fp64",
    "steps": STEPS,
    "global_batch_size": 8,
    "seq_len": 16,
    "gc_interval": 0,
}


@frozen
class Step:
    """What a step did, by names of parameters."""

    changed: frozenset[str]
    gradients: frozenset[str]
    """Those that have one on this rank."""
    state: frozenset[str]
    """Those that have state of the optimizer after it on this rank."""
    norm: float


@frozen
class Outcome:
    steps: list[Step]
    weights: dict[str, Tensor]
    losses: list[float]
    """Of rank 0 alone."""


@define(kw_only=True, slots=False)
class Watch(TrainingHook):
    """Notes what each step does, by whole tensors and not by digests."""

    def __attrs_post_init__(self) -> None:
        self.steps: list[Step] = []
        self.weights: dict[str, Tensor] = {}

    def on_train_begin(self, context: Any) -> None:
        self.weights = _whole(context)

    def on_gradients(self, context: Any) -> None:
        self._gradients = frozenset(name for name, parameter in _own(context) if parameter.grad is not None)

    def on_step_end(self, context: Any) -> None:
        before, self.weights = self.weights, _whole(context)
        changed = frozenset(name for name, now in self.weights.items() if not torch.equal(now, before[name]))
        state = frozenset(name for name, parameter in _own(context) if context.optimizer.state.get(parameter))
        self.steps.append(Step(changed, self._gradients, state, context.grad_norm.item()))


def _own(context: Any) -> list[tuple[str, Tensor]]:
    groups = context.optimizer.param_groups
    return [pair for group in groups for pair in zip(group["names"], group["params"], strict=True)]


def _whole(context: Any) -> dict[str, Tensor]:
    return whole_tensors(dict(_own(context)), context.build.mesh)


def run(
    folder: Path, name: str = "run", *, stages: Any = STAGES, hooks: Any = (), patience: int = 100, **changes: Any
) -> Outcome:
    """Train in stages, in float64 if not said otherwise. Collective."""
    plugins = {"freeze": Freeze(stages=stages, patience=patience), **changes.pop("plugins", {})}
    settings = {**SETTINGS, "job": {"name": name, "output": str(folder)}, **changes}
    watch = Watch()
    job = tiny_job(str(folder), installed(), **settings, plugins=plugins)
    summary = Trainer(job, hooks=[*hooks, watch], catalog=installed(), echo=lambda line: None).run()
    lines = map(json.loads, (summary.folder / "metrics.jsonl").read_text().splitlines())
    return Outcome(watch.steps, watch.weights, [line["loss"] for line in lines if "loss" in line])


def selected(outcome: Outcome) -> list[set[str]]:
    """Names that the stages' patterns fit, step by step, found apart from the plugin's own selection."""
    names = set(outcome.weights)
    parts = {
        key: {name for name in names if name.startswith(key)} for key in ("embedding", "layers.0", "layers.1", "head")
    }
    last = parts["layers.1"] | parts["head"]
    first = parts["embedding"] | parts["layers.0"]
    return [last, last, first, first, parts["head"], names, names]
