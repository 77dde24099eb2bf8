"""The ranks of a run: how they are started, find each other, end together, and are watched.

Nothing here knows what a run does. `world` says which rank this process is. `supervisor` starts ranks on one machine,
and `rank_process` is such a rank, or one that torchrun or SLURM has started. `rendezvous` is the store that ranks use
before and besides any process group, and `watchdog` ends a rank when another one has failed or the run hangs.
"""
