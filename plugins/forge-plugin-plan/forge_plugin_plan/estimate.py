"""A job's plan: that it can be built on so many ranks, and what they take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen

from forge_core.contracts.layout import Layout
from forge_core.job import Job
from forge_core.parallel.layout import plan_layout
from forge_core.plugins.catalog import Catalog
from forge_plugin_plan.fake_world import Said
from forge_plugin_plan.simulate import RankPlan, simulate

PLAYED = 4
"""Pipeline ranks whose steps are all played; of more, the first, which has most micro-batches on their way, the last,
which has the loss, and the one with most weights."""


@frozen(kw_only=True)
class Plan:
    """What a job takes on ranks that need not exist."""

    job: Job
    layout: Layout
    device: str
    """Whose kernels are assumed: `cuda`, or `cpu` where the job says so."""
    ranks: Sequence[RankPlan]
    """One of each pipeline rank, from the first; all others are like one of these."""

    @property
    def fullest(self) -> RankPlan:
        """The rank that takes most memory."""
        played = [rank for rank in self.ranks if rank.memory] or self.ranks
        return max(played, key=lambda rank: rank.memory.peak if rank.memory else sum(rank.training_state.values()))

    @property
    def busiest(self) -> RankPlan:
        """The rank that computes most."""
        return max(self.ranks, key=lambda rank: rank.traffic.flops if rank.traffic else 0)


def make_plan(job: Job, catalog: Catalog, world_size: int) -> Plan:
    """Build the job for a rank of each pipeline stage, in this process, and play a step. No data are read.

    Raises:
        JobError: it cannot be built on so many ranks; tells what every stage has to say.
        ForgeError: this process has a process group.
    """
    device = "cpu" if job.train.device == "cpu" else "cuda"
    layout, _ = plan_layout(job, world_size)
    said, behind = Said(), world_size // layout.pp

    def rank(number: int, play: bool) -> RankPlan:
        return simulate(job, catalog, world_size, number * behind, said, torch.device(device), play)

    if layout.pp <= PLAYED:
        ranks = [rank(number, play=True) for number in range(layout.pp)]
    else:
        ranks = [rank(number, play=False) for number in range(layout.pp)]
        fullest = max(range(layout.pp), key=lambda number: sum(ranks[number].training_state.values()))
        for number in sorted({0, fullest, layout.pp - 1}):
            ranks[number] = rank(number, play=True)
    return Plan(job=job, layout=layout, device=device, ranks=ranks)
