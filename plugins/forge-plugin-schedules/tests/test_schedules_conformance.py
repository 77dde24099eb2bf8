"""The schedules keep the contracts of their kind."""

from __future__ import annotations

from forge_plugin_schedules import Cosine, InverseSqrt, LengthSchedule, Linear, NoSchedule, Sequential
from forge_plugin_schedules.schedules import SequentialPart
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


class TestLengthSchedule(HookSuite):
    component = LengthSchedule(lengths=(2, 4, 8), start_tokens=(32, 96))
    changes_training = True
