"""The schedules keep the contracts of their kind."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen

from forge_core import Job
from forge_core.contracts.contexts import BuildContext
from forge_plugin_schedules import Cosine, InverseSqrt, LengthSchedule, Linear, NoSchedule, Sequential
from forge_plugin_schedules.schedules import SequentialPart
from forge_testing import TinyModel
from forge_testing.suites import HookSuite, SchedulerSuite


class TestCosine(SchedulerSuite):
    component = Cosine(warmup_steps=10, min_ratio=0.1)


class TestCosineOfItsOwnLength(SchedulerSuite):
    component = Cosine(decay_steps=50)


class TestLinear(SchedulerSuite):
    component = Linear(warmup_steps=3)


class TestInverseSqrt(SchedulerSuite):
    component = InverseSqrt(warmup_steps=10)


class TestNoSchedule(SchedulerSuite):
    component = NoSchedule()


class TestSequential(SchedulerSuite):
    component = Sequential(
        parts=(
            SequentialPart(schedule=Linear(warmup_steps=3), until=20),
            SequentialPart(schedule=Cosine(min_ratio=0.1), scale=0.5),
        )
    )


@frozen(kw_only=True)
class RunningMean(TinyModel):
    """A model whose positions see those before them, without which a piece trains as the whole sequence does."""

    def build(self, context: BuildContext) -> Any:
        network: Any = super().build(context)
        embed = network.embed

        def mean_so_far(batch: Any) -> Any:
            (x_BSD,) = embed(batch)
            counts_S = torch.arange(1, x_BSD.shape[1] + 1, dtype=x_BSD.dtype, device=x_BSD.device)
            return (x_BSD.cumsum(1) / counts_S[:, None],)

        network.embed = mean_so_far
        return network


class TestLengthSchedule(HookSuite):
    component = LengthSchedule(lengths=(2, 4, 8), start_tokens=(32, 96))
    changes_training = True

    def _job(self, *arguments: Any, **changes: Any) -> Job:
        return super()._job(*arguments, model=RunningMean(), **changes)
