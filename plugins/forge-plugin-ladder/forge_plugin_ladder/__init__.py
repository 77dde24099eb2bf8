"""Scaling laws from small runs: points, laws, fits with intervals, predictions."""

from forge_plugin_ladder.law import Additive, Law, Repeated, Sizes
from forge_plugin_ladder.points import Point, read_points, write_points
from forge_plugin_ladder.rules import Rule, Scale

__all__ = ["Additive", "Law", "Point", "Repeated", "Rule", "Scale", "Sizes", "read_points", "write_points"]
