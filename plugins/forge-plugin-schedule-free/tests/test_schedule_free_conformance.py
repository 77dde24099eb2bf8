"""The Schedule-Free optimizers keep the contracts of their kind."""

from __future__ import annotations

from forge_plugin_schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
from forge_testing.suites import OptimizerSuite


class TestScheduleFreeAdamW(OptimizerSuite):
    component = ScheduleFreeAdamW(lr=1e-2, eps=1e-5, warmup_steps=2)
    layouts = ("fsdp2",)  # it works element by element
    moves_at_rate_zero = True


class TestScheduleFreeSGD(OptimizerSuite):
    component = ScheduleFreeSGD(lr=0.5)
    layouts = ("fsdp2",)  # it works element by element
    moves_at_rate_zero = True
