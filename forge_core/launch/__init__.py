"""Ranks of a run: how they are started, find each other, are watched, and end together.

Nothing here depends on what a run does. `supervisor` starts ranks; `rank_process` is one of these ranks, or one that
another launcher started.
"""
