"""Schedule-Free optimizers: types `schedule_free_adamw` and `schedule_free_sgd` of kind `optimizer`."""

from forge_plugin_schedule_free.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD

__all__ = ["ScheduleFreeAdamW", "ScheduleFreeSGD"]
