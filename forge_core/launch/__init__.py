"""Ranks of a run: how they are started, find each other, are watched, and end together.

Nothing here knows what a run does. `world` reads which rank this process is, and `supervisor` starts ranks on one
machine. `rank_process` is such a rank, or one that torchrun or SLURM has started: its log, stop requests and failure
report. `rendezvous` is the store that ranks use before and beside any process group, and `watchdog` ends a rank when
another one has failed or the run hangs.
"""
