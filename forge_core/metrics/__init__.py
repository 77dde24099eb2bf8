"""Measurements of a run, and the core's loggers."""
