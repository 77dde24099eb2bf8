"""Ranks of a run: how they are started, find each other, are watched, and end together.

Nothing here knows what a run does. `supervisor` starts ranks; `rank_process` is one of them or of another launcher's.
"""
