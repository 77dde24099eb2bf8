"""The estimates for a job on a number of ranks, each built and simulated in this process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from attrs import define, field, frozen

from forge_core.contracts.layout import Layout
from forge_core.job import Job
from forge_core.parallel.layout import plan_layout
from forge_core.plugins.catalog import Catalog
from forge_plugin_plan.fake_world import BroadcastLog
from forge_plugin_plan.lines import Line, plan_lines
from forge_plugin_plan.simulate import RankPlan, StateLog, simulate

PLAYED = 4
"""Up to this number of pipeline ranks, the step of each is simulated. With more, steps are simulated only for the first
rank, which has the most micro-batches in flight, the last, which has the loss, and the one with the most weights."""


@frozen(kw_only=True)
class Plan:
    """Estimates for a job on ranks that need not exist."""

    job: Job
    layout: Layout
    device: str
    """Device whose kernels are assumed: `cuda`, or `cpu` if the job sets it."""
    ranks: Sequence[RankPlan]
    """One rank of each pipeline rank, in order; all others are like one of these."""
    lines: Sequence[Line] = ()
    """Lines that components of the job add to the heading."""

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(self.ranks[0].outline.sizes.values())

    @property
    def trained(self) -> int:
        """Parameters of the whole model that are trained; the others are frozen."""
        # Each rank lists the parameters of its pipeline rank alone
        trained = frozenset[str]().union(*(rank.trained for rank in self.ranks))
        return sum(size for name, size in self.ranks[0].outline.sizes.items() if name in trained)

    @property
    def fullest(self) -> RankPlan:
        """The rank with the largest peak memory."""
        # Ranks without a simulated step have no peak, and their state alone cannot be compared with one
        played = [rank for rank in self.ranks if rank.memory] or self.ranks
        return max(played, key=lambda rank: rank.memory.peak if rank.memory else sum(rank.training_state.values()))

    @property
    def busiest(self) -> RankPlan:
        """The rank with most FLOPs."""
        return max(self.ranks, key=lambda rank: rank.traffic.flops if rank.traffic else 0)


def make_plan(job: Job, catalog: Catalog, world_size: int, report: Callable[[str], object] = lambda text: None) -> Plan:
    """Build the job for a rank of each pipeline stage, in this process, and simulate a step.

    Of the data, at most a sample is read, by sources that report on it (`HasPlanDataLines`).

    Args:
        job: the job.
        catalog: components that are installed.
        world_size: number of ranks.
        report: receives a description of the next piece of work, several times for plans that take long.

    Raises:
        JobError: it cannot be built on this number of ranks; lists the problems of every stage.
        ForgeError: this process has a process group.
    """
    layout, _ = plan_layout(job, world_size)
    player = _Player(job, catalog, layout, report)
    with _quick_collections():
        if layout.pp <= PLAYED:
            ranks = [player.rank(number, play=True) for number in range(layout.pp)]
        else:
            ranks = player.some_ranks()
    return Plan(job=job, layout=layout, device=player.device, ranks=ranks, lines=[*plan_lines(job, catalog)])


@define
class _Player:
    """Builds ranks of a job, one after the other, and simulates steps of them."""

    job: Job
    catalog: Catalog
    layout: Layout
    report: Callable[[str], object]
    broadcasts: BroadcastLog = field(factory=BroadcastLog)
    states: StateLog = field(factory=StateLog)

    @property
    def device(self) -> str:
        return "cpu" if self.job.train.device == "cpu" else "cuda"

    def rank(self, number: int, play: bool) -> RankPlan:
        """Returns the plan of a rank of pipeline rank `number`; without a step unless `play`."""
        work = "simulating a step of" if play else "building"
        work = f"{work} pipeline rank {number} of {self.layout.pp}" if self.layout.pp > 1 else f"{work} a rank"
        self.report(work)
        return simulate(
            self.job,
            self.catalog,
            self.layout.world_size,
            # The first rank of this pipeline rank: the pipeline is the outermost dimension of the mesh
            number * (self.layout.world_size // self.layout.pp),
            self.broadcasts,
            torch.device(self.device),
            self.states,
            play,
            report=lambda text: self.report(f"{work}, {text}"),
        )

    def some_ranks(self) -> list[RankPlan]:
        """Returns the plans of all pipeline ranks, with a step of the first, of the last and of the fullest."""
        # Rank 0 first: it broadcasts what the others receive. Which has most weights is known once all are built.
        last = self.layout.pp - 1
        ranks = [self.rank(number, play=number in (0, last)) for number in range(self.layout.pp)]
        fullest = self._fullest(ranks)
        if not self._confirmed(ranks, fullest):
            # One prediction was wrong, so none is used
            for number in range(1, last):
                self.states = StateLog()  # so that nothing is predicted
                ranks[number] = self.rank(number, play=False)
            fullest = self._fullest(ranks)
        if ranks[fullest].memory is None and not ranks[fullest].failure:
            ranks[fullest] = self.rank(fullest, play=True)
        return ranks

    def _confirmed(self, ranks: list[RankPlan], fullest: int) -> bool:
        """Whether a rank has the sizes predicted from other ranks; replaces its predicted plan by the true one."""
        # The steps of the first and the last rank are simulated, so their sizes were not predicted
        number = fullest if fullest not in (0, self.layout.pp - 1) else 1
        predicted, states = ranks[number], self.states
        if number == fullest:
            ranks[number] = self.rank(number, play=True)
        else:
            self.states = StateLog()  # so that nothing is predicted
            ranks[number] = self.rank(number, play=False)
            self.states = states
        confirmed = ranks[number]
        return (predicted.gradients, predicted.optimizer) == (confirmed.gradients, confirmed.optimizer)

    @staticmethod
    def _fullest(ranks: Sequence[RankPlan]) -> int:
        return max(range(len(ranks)), key=lambda number: sum(ranks[number].training_state.values()))


@contextmanager
def _quick_collections() -> Iterator[None]:
    """Within this context, the garbage collector searches more rarely, and not what existed before: torch's modules."""
    frozen_before, thresholds = gc.get_freeze_count(), gc.get_threshold()
    gc.freeze()
    gc.set_threshold(10_000, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        # Else objects that a caller has frozen would be searched again
        if not frozen_before:
            gc.unfreeze()
