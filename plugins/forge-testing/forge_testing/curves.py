"""Short runs, and their numbers that must not depend on the layout: loss, gradients, norm, weights, evaluations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from attrs import evolve, frozen
from torch import Tensor

from forge_core.contracts.contexts import StepContext
from forge_core.data.loader import TrainLoader
from forge_core.engine.build import Run, build_context, build_run
from forge_core.engine.evaluation import evaluate
from forge_core.engine.step import Stepper
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_testing.catalogs import installed
from forge_testing.pretend.clocks import clocks
from forge_testing.runs import whole_tensors


@frozen
class Curve:
    """Numbers and weights of a run."""

    losses: list[float]
    norms: list[float]
    """Global norms of the gradient, before clipping."""
    initial: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    """Gradients of the first step by parameter name."""
    weights: Mapping[str, Tensor]
    """Weights after the last step, by parameter name."""
    evaluation: Mapping[str, float]
    """All metrics of the job's evaluations at the end."""
    waits: Mapping[tuple[str, str], int]
    """How often the host waited for the device in the last step and its update, by (what for, file and line), where
    that is counted: on the pretended device."""

    def on_host(self) -> Curve:
        """The same with its tensors on the host."""
        moved: dict[str, Any] = {
            name: {key: value.cpu() for key, value in getattr(self, name).items()} for name in TENSORS
        }
        return evolve(self, **moved)


TENSORS = ("initial", "gradients", "weights")


@frozen
class Difference:
    """The largest differences between two curves."""

    initial: float
    loss: float
    norm: float
    gradient: float
    weights: float
    """Distance of the weights relative to the norm of their change over the steps."""
    evaluation: float
    """Of metrics above 1 (a perplexity) relative to them."""

    @classmethod
    def between(cls, actual: Curve, expected: Curve) -> Difference:
        update = {name: expected.weights[name] - expected.initial[name] for name in expected.initial}
        error = {name: actual.weights[name] - expected.weights[name] for name in expected.initial}
        return cls(
            initial=_largest(actual.initial, expected.initial),
            loss=_worst(abs(a - b) for a, b in zip(actual.losses, expected.losses, strict=True)),
            norm=_worst(abs(a - b) for a, b in zip(actual.norms, expected.norms, strict=True)),
            gradient=_largest(actual.gradients, expected.gradients),
            weights=_worst([_norm(error) / _norm(update)]),
            evaluation=_furthest(actual.evaluation, expected.evaluation),
        )


def train(job: Job, catalog: Catalog | None = None) -> Curve:
    """Train a job from the start. Collective.

    Args:
        job: The job; its checkpoints, loggers and hooks are not used.
        catalog: Catalog of stages and defaults; by default, everything installed.

    Returns:
        The curve, with whole tensors on every rank.
    """
    with Training.of(job, catalog) as training:
        return training.curve(job.train.steps)


@frozen
class Training(AbstractContextManager["Training", None]):
    """A job that was built, before its first step or after some. Its methods are collective."""

    run: Run
    loader: TrainLoader

    @classmethod
    def of(cls, job: Job, catalog: Catalog | None = None) -> Training:
        """Build a job; by default, with everything that is installed."""
        context = build_context(job, catalog or installed(), None)
        run = build_run(job, context)
        return cls(run, TrainLoader(job, run.datasets, context))

    def __exit__(self, *exception: object) -> None:
        self.loader.close()

    def curve(self, steps: int) -> Curve:
        """Train for some steps, from the first one on, and evaluate."""
        stepper, initial = Stepper(self.run), self._weights()
        losses, norms, gradients = [], [], dict[str, Tensor]()
        for step in range(steps):
            clocks.waits.clear()
            self.run.rates.apply(step, 0)
            _, sums = stepper.gradients(self.loader.next_step(), step)
            norm = stepper.norm()
            if step == 0:
                gradients = self._gradients()
            stepper.update(_step_context(self.run, step, norm), sums["loss_sum"])
            waits = dict(clocks.waits)
            losses.append((sums["loss_sum"] / sums["count"]).item())
            norms.append(norm.item())
        return Curve(losses, norms, initial, gradients, self._weights(), evaluate(self.run, steps), waits)

    def norm(self, step: int) -> float:
        """Compute the gradients of a step that follows the last one, and return their norm, without an update."""
        stepper = Stepper(self.run)  # not the curve's stepper: a caller may have changed which groups it finds
        stepper.gradients(self.loader.next_step(), step)
        return stepper.norm().item()

    def _weights(self) -> dict[str, Tensor]:
        weights = {item.name: item.parameter.detach() for item in self.run.parameters}
        return whole_tensors(weights, self.run.context.mesh)

    def _gradients(self) -> dict[str, Tensor]:
        there = {item.name: item.parameter.grad for item in self.run.parameters if item.parameter.grad is not None}
        return whole_tensors(there, self.run.context.mesh)


def same_curve(ranks: Sequence[Curve], alone: Curve) -> None:
    """Assert that rank 0 has the curve of one process, in float64: `compare` of `forge_testing.laws.Case`."""
    difference = Difference.between(ranks[0], alone)
    near = max(difference.loss, difference.norm, difference.gradient, difference.evaluation)
    assert not difference.initial, difference
    assert near < 1e-12, difference
    assert difference.weights < 1e-10, difference


def _step_context(run: Run, step: int, norm: Tensor) -> StepContext:
    return StepContext(
        job=run.job,
        model=run.model,
        optimizer=run.optimizer,
        tokenizer=run.context.tokenizer,
        folder=None,
        step=step + 1,
        grad_norm=norm,
    )


def _largest(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert actual.keys() == expected.keys(), f"not both have {', '.join(sorted(actual.keys() ^ expected.keys()))}"
    return _worst((actual[name] - expected[name]).abs().max().item() for name in expected)


def _furthest(actual: Mapping[str, float], expected: Mapping[str, float]) -> float:
    assert actual.keys() == expected.keys(), f"not both have {', '.join(sorted(actual.keys() ^ expected.keys()))}"
    return _worst(abs(actual[name] - expected[name]) / max(1, abs(expected[name])) for name in expected)


def _worst(differences: Iterable[float]) -> float:
    """Return the largest difference. NaN counts as infinite, as every comparison with it would be false."""
    return max((math.inf if math.isnan(value) else value for value in differences), default=0.0)


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors.values()))
