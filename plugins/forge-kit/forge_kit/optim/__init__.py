"""Parts of optimizers and schedules."""
