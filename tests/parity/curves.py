"""A short run, with all that must not depend on the layout: loss, gradients and their norm, weights, evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from forge_core.data.held_out import evaluation_batches
from forge_core.data.loader import TrainLoader
from forge_core.engine.build import build_context, build_run
from forge_core.engine.step import Stepper
from forge_core.parallel.mesh import all_reduce_tokens, gather_objects, pipeline_group
from forge_core.plugins.catalog import Catalog

STEPS = 5


@frozen
class Curve:
    """What a run came to."""

    losses: list[float]
    norms: list[float]
    """Of the gradient, before clipping."""
    initial: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    """Of the first step."""
    weights: Mapping[str, Tensor]
    """After the last step."""
    evaluation: float
    """Held-out loss at the end."""


@frozen
class Difference:
    """The largest differences between two curves."""

    initial: float
    loss: float
    norm: float
    gradient: float
    weights: float
    """Relative to the norm of what the steps changed."""
    evaluation: float

    @classmethod
    def between(cls, found: Curve, expected: Curve) -> Difference:
        update = {name: expected.weights[name] - expected.initial[name] for name in expected.initial}
        error = {name: found.weights[name] - expected.weights[name] for name in expected.initial}
        return cls(
            initial=_largest(found.initial, expected.initial),
            loss=max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)),
            norm=max(abs(a - b) for a, b in zip(found.norms, expected.norms, strict=True)),
            gradient=_largest(found.gradients, expected.gradients),
            weights=_norm(error) / _norm(update),
            evaluation=abs(found.evaluation - expected.evaluation),
        )


def train(job: Any) -> Curve:
    """Train a job from the start; collective."""
    context = build_context(job, Catalog.installed(), None)
    run = build_run(job, context)
    stepper, loader = Stepper(run), TrainLoader(job, run.datasets, context)
    pipeline = pipeline_group(context.mesh)
    initial = _whole({item.name: item.parameter.detach() for item in run.parameters}, pipeline)
    losses, norms, gradients = [], [], {}
    for step in range(job.train.steps):
        run.rates.apply(step, 0)
        _, sums = stepper.gradients(loader.next_step(), step)
        norm = stepper.norm()
        if step == 0:
            gradients = _whole({item.name: item.parameter.grad for item in run.parameters}, pipeline)
        stepper.update(SimpleNamespace(grad_norm=norm, requests=SimpleNamespace(skip="")), sums["loss_sum"])
        losses.append((sums["loss_sum"] / sums["count"]).item())
        norms.append(norm.item())
    loader.close()
    weights = _whole({item.name: item.parameter.detach() for item in run.parameters}, pipeline)
    return Curve(losses, norms, initial, gradients, weights, _held_out_loss(job, run))


def _held_out_loss(job: Any, run: Any) -> float:
    total = torch.zeros(2, dtype=torch.float64)
    for batch in evaluation_batches(run.held_out, 0, job, run.context):
        output = run.executor.evaluate([batch])
        total += torch.stack([output.loss_sum.double(), output.count.double()])
    all_reduce_tokens(total, run.context.mesh)
    return (total[0] / total[1]).item()


def _whole(tensors: Mapping[str, Any], pipeline: Any) -> dict[str, Tensor]:
    """Of all ranks, those of a pipeline included. What several of them have must be equal; else it is infinite here."""
    own = {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for name, t in tensors.items()}
    found: dict[str, Tensor] = {}
    for part in gather_objects(own, pipeline) if pipeline is not None else [own]:
        unequal = [name for name in part.keys() & found.keys() if not torch.equal(part[name], found[name])]
        found |= part | {name: torch.full_like(part[name], torch.inf) for name in unequal}
    return found


def _largest(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return sum(tensor.square().sum().item() for tensor in tensors.values()) ** 0.5
