"""What a run measures of itself, and the core's loggers."""
