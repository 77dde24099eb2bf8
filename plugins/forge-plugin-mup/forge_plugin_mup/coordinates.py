"""The coordinate check: sizes of activations and logits, and of their change in training, by width and depth.

Beside them, updates relative to weights by role, as the hook `training_stats` logs them in the last step.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import define, frozen
from torch import Tensor

from forge_core import Catalog, Job, JobError, Trainer, TrainingHook, read_metrics
from forge_core.contracts.contexts import StepContext
from forge_core.contracts.model import Model
from forge_plugin_mup.mup import LAYERS, MuP, with_keys
from forge_plugin_taps.stats.training_stats import RATIO, WHOLE, TrainingStats

QUANTITIES = ("middle layer", "last layer", "last norm", "logits")
"""Activations that are measured, in the order of the forward pass."""
START, CHANGE, UPDATE = "at the start", "change", "update / weight"


@frozen
class Trend:
    """Root mean squares of one quantity at several sizes."""

    axis: str
    """width or depth."""
    factors: Sequence[int]
    """Of the base, ascending."""
    quantity: str
    what: str
    """`START`: of the initial model. `CHANGE`: of the difference after the last step. `UPDATE`: of the last update,
    relative to the weights, of the parameters whose role is `quantity`; norms, with the mean over layers."""
    values: Sequence[float]
    """By factor."""
    exponent: float
    """p of the power law values ~ factor^p, by least squares of the logarithms."""

    def fault(self, bound: float) -> str:
        """Returns `grows` or `vanishes` if the exponent is beyond the bound, else an empty string."""
        # An update has a low rank, and is a smaller part of a wide matrix: no exponent is wanted
        if not math.isfinite(self.exponent) or (self.exponent > bound and self.what != UPDATE):
            return "grows"
        if self.what == UPDATE:
            return ""
        # Initial logits may vanish: those of a wide model are a sum that nothing has aligned yet
        free = self.quantity == "logits" and self.what == START
        return "vanishes" if self.exponent < -bound and not free else ""


@define(kw_only=True, slots=False)
class Coordinates(TrainingHook):
    """Measures a fixed batch, the first of the run, before the first step and after every step."""

    steps: int

    def __attrs_post_init__(self) -> None:
        # No fields: those without `init` are state
        self.batch: Mapping[str, Tensor] = {}
        self.before: Mapping[str, Tensor] = {}
        self.start: dict[str, float] = {}
        self.change: dict[str, float] = {}
        self.updates: dict[str, float] = {}

    def on_step_begin(self, context: StepContext) -> None:
        """Measures the initial model."""
        if not self.batch:
            self.batch = dict(context.batches[0])
            self.before = activations(context.model, self.batch)
            self.start = {name: _size(value) for name, value in self.before.items()}

    def on_step_end(self, context: StepContext) -> None:
        """Measures the change since then, after the last step."""
        if context.step == self.steps:
            after = activations(context.model, self.batch)
            self.change = {name: _size(after[name] - value) for name, value in self.before.items()}


def _size(value: Tensor) -> float:
    # In float64: squares of small changes would vanish
    return value.double().square().mean().sqrt().item()


def activations(model: Model, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the activations of `QUANTITIES`, of a whole model in one process."""
    found: dict[str, Tensor] = {}
    layers: list[Any] = list(model.layers.values())
    # Not the first one: of a deep model, it is a smaller part of the whole
    pairs = {"middle layer": layers[(len(layers) - 1) // 2], "last layer": layers[-1]}

    def keep(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, carry: Sequence[Tensor]) -> None:
            found[name] = carry[0].detach().float()

        return hook

    hooks = [layer.register_forward_hook(keep(name)) for name, layer in pairs.items()]
    training = model.training
    # Without dropout and whatever else is random in training
    model.eval()
    try:
        with torch.no_grad():
            hidden = model({name: value for name, value in batch.items() if name != "labels"})
            found["last norm"], found["logits"] = hidden.float(), model.head.logits(hidden).float()
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return {name: found[name] for name in QUANTITIES}


def sizes_of(plugin: MuP, width: int, depth: int) -> dict[str, Any]:
    """Returns the base's keys at so many times its width and depth: whole numbers grow, all others stay."""

    def grown(keys: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: grown(value)
            if isinstance(value, Mapping)
            else value * (depth if key == LAYERS else width)
            if type(value) is int
            else value
            for key, value in keys.items()
        }

    return grown(plugin.base)


def measure(job: Job, catalog: Catalog, keys: Mapping[str, Any], steps: int, plugins: Mapping[str, Any]) -> Coordinates:
    """Train a job at other sizes of its model for some steps, alone in this process and at a constant rate.

    Args:
        job: as read.
        catalog: the installed components.
        keys: of its model.
        steps: to train.
        plugins: of the job.

    Raises:
        JobError: the model cannot have such sizes.
    """
    model, problems = with_keys(job.model, keys)
    if problems:
        raise JobError(problem.below("plugins.mup.base") for problem in problems)
    hook = Coordinates(steps=steps)
    constant: Any = catalog.load("scheduler", "forge-run/constant")
    with tempfile.TemporaryDirectory() as folder:
        changed = attrs.evolve(
            job,
            model=model,
            plugins=plugins,
            # A warm-up would leave the first steps without an update
            scheduler=constant(),
            train=attrs.evolve(job.train, steps=steps, stop_after=0),
            job=attrs.evolve(job.job, output=folder),
            eval=attrs.evolve(job.eval, interval=0),
            checkpoint=attrs.evolve(job.checkpoint, interval=0, interval_minutes=0),
            parallel={},
            evaluations={},
            hooks={},
            loggers={},
        )
        # A job without loggers has its default ones, of which the console prints every step
        with redirect_stdout(StringIO()):
            stats = TrainingStats(interval=steps, logits=False)
            Trainer(changed, hooks=[hook, stats], catalog=catalog, echo=lambda _: None).run()
        hook.updates = update_ratios(Path(folder) / changed.job.name)
    return hook


def update_ratios(run: Path) -> dict[str, float]:
    """Returns the last update over the weights by role, as the mean over layers, which `training_stats` has logged."""
    last, found = read_metrics(run)[-1], dict[str, list[float]]()
    for name, value in last.items():
        if name.startswith(f"{RATIO}/") and not name.endswith(f"/{WHOLE}"):
            found.setdefault(name.rpartition("/")[2], []).append(float(value))
    return {role: sum(ratios) / len(ratios) for role, ratios in found.items()}


def trends(axis: str, factors: Sequence[int], measured: Sequence[Coordinates]) -> list[Trend]:
    """Returns the trend of each quantity over sizes that are these factors times the base."""
    found = []
    for name in QUANTITIES:
        of_both = {START: [each.start[name] for each in measured], CHANGE: [each.change[name] for each in measured]}
        found += [Trend(axis, factors, name, what, tuple(own), exponent(factors, own)) for what, own in of_both.items()]
    # Roles are the same at every size
    for role in measured[0].updates:
        ratios = tuple(each.updates[role] for each in measured)
        found.append(Trend(axis, factors, role, UPDATE, ratios, exponent(factors, ratios)))
    return found


def exponent(factors: Sequence[float], values: Sequence[float]) -> float:
    """Returns p of values ~ factors^p by least squares of the logarithms; infinite if a value is not finite.

    Values that are all 0 have no trend: 0.
    """
    if not all(map(math.isfinite, values)):
        return math.inf
    if not any(values):
        return 0.0
    x = [math.log(factor) for factor in factors]
    y = [math.log(max(value, 1e-300)) for value in values]
    # Relative to the mean, so that the slope needs no intercept
    middle = sum(x) / len(x)
    spread = sum((each - middle) ** 2 for each in x)
    return sum((a - middle) * b for a, b in zip(x, y, strict=True)) / spread
