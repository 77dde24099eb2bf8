"""The estimates for a job on a number of ranks, each built and simulated in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import frozen

from forge_core.contracts.layout import Layout
from forge_core.job import Job
from forge_core.parallel.layout import plan_layout
from forge_core.plugins.catalog import Catalog
from forge_plugin_plan.fake_world import BroadcastLog
from forge_plugin_plan.simulate import RankPlan, StateLog, simulate

PLAYED = 4
"""Up to this number of pipeline ranks, the step of each is simulated; with more, only those of the first, which has
most micro-batches in flight, of the last, which has the loss, and of the one with most weights."""


@frozen(kw_only=True)
class Plan:
    """Estimates for a job on ranks that need not exist."""

    job: Job
    layout: Layout
    device: str
    """Device whose kernels are assumed: `cuda`, or `cpu` if the job says so."""
    ranks: Sequence[RankPlan]
    """One rank of each pipeline rank, in order; all others are like one of these."""

    @property
    def fullest(self) -> RankPlan:
        """The rank with the largest peak memory."""
        played = [rank for rank in self.ranks if rank.memory] or self.ranks
        return max(played, key=lambda rank: rank.memory.peak if rank.memory else sum(rank.training_state.values()))

    @property
    def busiest(self) -> RankPlan:
        """The rank with most FLOPs."""
        return max(self.ranks, key=lambda rank: rank.traffic.flops if rank.traffic else 0)


def make_plan(job: Job, catalog: Catalog, world_size: int, report: Callable[[str], object] = lambda text: None) -> Plan:
    """Build the job for a rank of each pipeline stage, in this process, and simulate a step. No data are read.

    Args:
        job: the job.
        catalog: components that are installed.
        world_size: number of ranks.
        report: receives what is done next, several times in plans that take long.

    Raises:
        JobError: it cannot be built on this number of ranks; lists the problems of every stage.
        ForgeError: this process has a process group.
    """
    device = "cpu" if job.train.device == "cpu" else "cuda"
    layout, _ = plan_layout(job, world_size)
    broadcasts, ranks_per_stage = BroadcastLog(), world_size // layout.pp
    states = StateLog()

    def rank(number: int, play: bool) -> RankPlan:
        work = "simulating a step of" if play else "building"
        work = f"{work} pipeline rank {number} of {layout.pp}" if layout.pp > 1 else f"{work} a rank"
        report(work)
        return simulate(
            job,
            catalog,
            world_size,
            number * ranks_per_stage,
            broadcasts,
            torch.device(device),
            states if not play else None,
            report=lambda text: report(f"{work}, {text}"),
        )

    if layout.pp <= PLAYED:
        ranks = [rank(number, play=True) for number in range(layout.pp)]
    else:
        # Rank 0 first: it broadcasts what the others receive. Which has most weights is known once all are built.
        last = layout.pp - 1
        ranks = [rank(number, play=number in (0, last)) for number in range(layout.pp)]
        fullest = max(range(layout.pp), key=lambda number: sum(ranks[number].training_state.values()))
        if fullest not in (0, last):
            ranks[fullest] = rank(fullest, play=True)
    return Plan(job=job, layout=layout, device=device, ranks=ranks)
