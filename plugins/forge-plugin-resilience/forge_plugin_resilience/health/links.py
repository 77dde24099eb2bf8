"""The hook `links`, and its measurement of the links between ranks."""

from __future__ import annotations

import socket
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import define, field, frozen
from attrs.validators import and_, ge, gt, le

from forge_core import Problem, TrainingHook
from forge_core.contracts.components import WhenResumed
from forge_core.contracts.errors import ForgeError

if TYPE_CHECKING:
    import torch

    from forge_core import Job
    from forge_core.contracts.contexts import StepContext, TrainContext
    from forge_core.contracts.layout import Layout

REPEATS = 3
"""Measurements, of which the fastest counts, after one that opens the connection."""
PERIOD = 251
"""Limit of the numbers that are sent: their sums are exact in float32."""


@frozen(kw_only=True)
class Link:
    """A measurement between ranks: of one machine together, or of two."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    """The machine of each rank."""
    gigabytes_per_s: float
    """Bytes that each rank sends over its link in a second: 2 (n - 1) / n of the tensor in an all-reduce."""
    is_right: bool
    """Whether the sum was right on every rank, to the bit."""
    within_machine: bool = False
    """Whether it is a sum over all ranks of a machine, and no exchange between two ranks."""

    def __str__(self) -> str:
        if self.within_machine and len(self.ranks) > 2:
            return f"ranks {', '.join(map(str, self.ranks))} on {self.hosts[0]}"
        return " and ".join(f"rank {rank} on {host}" for rank, host in zip(self.ranks, self.hosts, strict=True))


@define(kw_only=True, slots=False)
class Links(TrainingHook):
    """Measures the links between ranks before the first step: sums within each machine, and across pairs of machines.

    Every sum must be right to the bit, and no link much slower than the median of its kind.
    """

    resumes_as: ClassVar[WhenResumed | None] = "safe"

    interval_steps: int = field(default=0, validator=ge(0))
    """Steps between further measurements; 0: only at the start. Each sends the tensor some ten times."""
    size_mb: float = field(default=64.0, validator=gt(0))
    """Megabytes of the tensor that is summed."""
    rounds: int = field(default=3, validator=ge(1))
    """Partners that each machine is measured with; fewer machines than this have fewer."""
    slow: float = field(default=0.7, validator=and_(gt(0), le(1)))
    """A link is slow below this part of the median bandwidth, if at least three were measured."""
    least_gb_per_s: float = field(default=0.0, validator=ge(0))
    """A link is slow below this many gigabytes per second, too; 0: no such limit."""
    on_fault: Literal["stop", "warn"] = "stop"
    """On a wrong sum: refuse to start, or save and stop with exit code 75; or warn. A slow link is warned of."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if layout.world_size == 1:
            yield Problem("", "a single rank has no links to others; leave this hook out, or start several ranks")

    def on_train_begin(self, context: TrainContext) -> None:
        """Measure once; on a wrong sum, raise a `ForgeError` on every rank. Collective."""
        if (text := self._measure(context)) and self.on_fault == "stop":
            raise ForgeError(f'{text}; leave the machine out, or set on_fault = "warn"')

    def on_step_end(self, context: StepContext) -> None:
        """Measure again after every `interval_steps` steps; on a wrong sum, save and stop. Collective."""
        if not self.interval_steps or context.step % self.interval_steps:
            return
        if (text := self._measure(context)) and self.on_fault == "stop":
            context.request_stop(text)

    def _measure(self, context: TrainContext) -> str:
        """Warn of slow links and wrong sums; returns the wrong sums."""
        from forge_core.parallel.mesh import global_rank

        links = measure_links(next(context.model.parameters()).device, self.size_mb, self.rounds)
        wrong = [f"the sum over {link} is wrong" for link in links if not link.is_right]
        if global_rank() == 0:
            for text in [*wrong, *slow_links(links, self.slow, self.least_gb_per_s)]:
                warnings.warn(text, stacklevel=2)
        return "; ".join(wrong)


def measure_links(device: torch.device, size_mb: float, rounds: int) -> list[Link]:
    """Sum within machines and across pairs of them. Collective; every rank returns the same list.

    Where all ranks are on one machine, the pairs are pairs of ranks.

    Args:
        device: where tensors are: CUDA for NCCL, the CPU for gloo.
        size_mb: of the tensor, in 10^6 bytes of float32.
        rounds: how many partners each machine has.
    """
    import torch.distributed as dist

    from forge_core.launch.progress_beacon import report_progress
    from forge_core.parallel.mesh import gather_objects, global_rank

    rank, hosts = global_rank(), gather_objects(socket.gethostname())
    machines: dict[str, list[int]] = {}
    for each, host in enumerate(hosts):
        machines.setdefault(host, []).append(each)
    measured: list[tuple[tuple[tuple[int, ...], bool], float, bool]] = []
    together = [ranks for ranks in machines.values() if len(ranks) > 1]
    # Every rank makes every group, in one order, as torch requires
    for ranks, group in [(ranks, dist.new_group(ranks)) for ranks in together]:
        if rank in ranks:
            seconds, right = _sum(partial(dist.all_reduce, group=group), ranks, device, size_mb)
            sent = 2 * (len(ranks) - 1) / len(ranks) * size_mb
            measured.append(((tuple(ranks), True), sent / 1e3 / seconds, right))
        # NCCL keeps buffers on the GPU for each group
        dist.destroy_process_group(group) if rank in ranks else None
    units = list(machines.values()) if len(machines) > 1 else [[each] for each in range(len(hosts))]
    for pairs in pairings(len(units), rounds):
        report_progress("measuring links")
        dist.barrier()  # a pair that began earlier would have the network to itself
        for pair in (tuple(sorted((units[one][0], units[other][0]))) for one, other in pairs):
            if rank in pair:
                peer = pair[0] if rank == pair[1] else pair[1]
                seconds, right = _sum(partial(_exchange, peer=peer), pair, device, size_mb)
                measured.append(((pair, False), size_mb / 1e3 / seconds, right))
    return _merge(gather_objects(measured), hosts)


def _merge(
    by_rank: Sequence[Sequence[tuple[tuple[tuple[int, ...], bool], float, bool]]], hosts: Sequence[str]
) -> list[Link]:
    """One link for what several ranks have measured: the slowest of them, and right if it was so for all."""
    # Two ranks of a machine have both a sum and an exchange
    merged: dict[tuple[tuple[int, ...], bool], tuple[float, bool]] = {}
    for measured in by_rank:
        for key, speed, right in measured:
            least, all_right = merged.get(key, (speed, True))
            merged[key] = (min(least, speed), all_right and right)
    return [
        Link(
            ranks=ranks,
            hosts=tuple(hosts[rank] for rank in ranks),
            gigabytes_per_s=speed,
            is_right=right,
            within_machine=within,
        )
        for (ranks, within), (speed, right) in merged.items()
    ]


def _sum(
    add: Callable[[torch.Tensor], object], ranks: Sequence[int], device: torch.device, size_mb: float
) -> tuple[float, bool]:
    """The fastest seconds of a sum over `ranks`, and whether all sums were right."""
    import torch

    from forge_core.parallel.mesh import global_rank

    elements = max(1, int(size_mb * 1e6 / 4))
    # Small whole numbers, whose sums are exact in float32
    pattern = torch.arange(elements, device=device, dtype=torch.int32).remainder_(PERIOD).to(torch.float32)
    expected = pattern * len(ranks) + sum(rank % PERIOD + 1 for rank in ranks)
    fastest, right = float("inf"), True
    for number in range(REPEATS + 1):
        # Each rank adds another number, so that a sum that lacks a rank, or has one twice, is not right
        tensor = pattern + (global_rank() % PERIOD + 1)
        _wait(device)
        began = time.perf_counter()
        add(tensor)
        _wait(device)
        # The first sum sets up the connections, and does not count
        fastest = min(fastest, time.perf_counter() - began) if number else fastest
        right = right and torch.equal(tensor, expected)
    return max(fastest, 1e-9), right


def _exchange(tensor: torch.Tensor, peer: int) -> None:
    """Add the peer's tensor to this one, in place, while it does the same."""
    import torch
    import torch.distributed as dist

    received = torch.empty_like(tensor)
    operations = [dist.P2POp(dist.isend, tensor.clone(), peer), dist.P2POp(dist.irecv, received, peer)]
    # As a batch: with NCCL, two ranks that both send first would wait for each other
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    tensor += received


def _wait(device: torch.device) -> None:
    import torch

    torch.get_device_module(device).synchronize()


def pairings(count: int, rounds: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds in which each of `count` has one partner, another one each time (the circle method); odd ones rest."""
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(min(rounds, len(seats) - 1)):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def slow_links(links: Sequence[Link], part: float, least: float) -> list[str]:
    """Which links are slow, in words; a rank or machine that is in all of them is named."""
    # Exchanges apart from sums, which stay within a machine and are faster
    kinds: Mapping[bool, list[Link]] = {
        within: [link for link in links if link.within_machine is within] for within in (False, True)
    }
    texts = []
    for measured in kinds.values():
        median = statistics.median(link.gigabytes_per_s for link in measured) if measured else 0.0
        # The median of one or two links does not show which is slow
        limit = max(part * median if len(measured) > 2 else 0.0, least)
        slow = [link for link in measured if link.gigabytes_per_s < limit]
        for link in slow:
            speed = f"{link.gigabytes_per_s:.3g} GB/s, where the median is {median:.3g}"
            texts.append(f"the link between {link} is slow: {speed}")
        shared = (
            set.intersection(*({*zip(link.ranks, link.hosts, strict=True)} for link in slow))
            if len(slow) > 1
            else set()
        )
        texts += [f"rank {rank} on {host} is in all slow pairs" for rank, host in shared]
    return texts
