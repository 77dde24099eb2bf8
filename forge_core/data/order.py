"""The order of a job's samples, whether its sources last, and how they changed since a checkpoint.

The order is a pure function of the seed and the global sample number: no rank, worker or layout enters it, so another
number of any of them continues the same sequence.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence, Sized
from fractions import Fraction
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forge_core.config.mixture import first_step, is_drawn, phase_weights, source_names
from forge_core.contracts.errors import JobError, Problem

if TYPE_CHECKING:
    from forge_core.checkpoint.state import Progress
    from forge_core.contracts.data import Dataset, Stream
    from forge_core.job import Job

ROUNDS = 4
BLOCK = 1024
"""Positions of a permutation that are evaluated at once."""
RESOLUTION = 1 << 40
"""The largest share if a temperature makes shares irrational."""


class Permutation:
    """A pseudo-random permutation of range(size), evaluated at any position in O(1) time and memory.

    A Feistel network of four rounds on the smallest even number of bits that holds `size`; results outside the range
    are encrypted again until one lies inside (cycle walking, Black and Rogaway 2002). The domain is less than four
    times `size`, so this takes fewer than four tries on average.
    """

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        half = (max(size - 1, 1).bit_length() + 1) // 2
        self._half, self._mask = np.uint64(half), np.uint64((1 << half) - 1)
        # A digest and not `hash`, whose values for strings differ from process to process.
        self._keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest(), "<u8")
        self._block_number, self._block = -1, [0]

    def __getitem__(self, position: int) -> int:
        # Positions are mostly read in order. In blocks one costs 0.5 µs; alone it costs 8 µs, more than reading it.
        number, offset = divmod(position, BLOCK)
        if number != self._block_number:
            self._block_number, self._block = number, self._evaluate(number * BLOCK)
        return self._block[offset]

    def _evaluate(self, start: int) -> list[int]:
        values = self._encrypt(np.arange(start, min(start + BLOCK, self.size), dtype=np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._encrypt(values[outside])
        return values.tolist()

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return left << self._half | right


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every input bit reaches every output bit. Products are modulo 2^64."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def whole_shares(weights: Sequence[float], temperature: float = 1.0) -> list[int]:
    """The smallest whole numbers in the proportion of weight ** (1 / temperature); 0 for a weight of 0 only."""
    if temperature == 1:
        # Exact: a weight means its shortest decimal, so that 0.1 is a tenth and not the nearest float.
        exact = [Fraction(repr(weight)) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        return smallest([int(weight * scale) for weight in exact])
    top = max(weights, default=0.0)
    flat = [(weight / top) ** (1 / temperature) if weight else 0.0 for weight in weights]
    shares = zip(flat, weights, strict=True)
    return smallest([max(1, round(share * RESOLUTION)) if weight else 0 for share, weight in shares])


def smallest(shares: Sequence[int]) -> list[int]:
    """The same proportions in the smallest whole numbers."""
    divisor = math.gcd(*shares) or 1
    return [share // divisor for share in shares]


class Turns:
    """Takes turns among sources with fixed shares. Its state is the number of turns of each source.

    The sequence is a chairman assignment (Tijdeman 1980): with k sources, after any n turns each has had its share of n
    to within 1 - 1/(2k - 2). With m = 2k - 2, turn c (from 0) of a source with share s

    - may come once s n - c >= 1/m, since it is then at most 1 - 1/m ahead of its share;
    - is due before s n - c > 1 - 1/m, since it would then be further behind.

    The source that is due first, of those that may come, takes the turn. `tests/data/test_turns.py` has the proof.
    """

    def __init__(self, shares: Sequence[int], taken: Sequence[int] = ()) -> None:
        """Continues after the turns `taken` by each source; `shares` holds one entry per source, 0 for never."""
        self.shares = list(shares)
        self.taken = list(taken) or [0] * len(shares)
        self.sources = [source for source, share in enumerate(shares) if share]
        """The sources that take turns."""
        self.cycle = sum(shares)
        """Turns after which each source has had exactly its share, and the sequence repeats."""
        # All arithmetic is in whole numbers, so that it is exact after any number of turns.
        self._turn = sum(self.taken)
        self._m = max(1, 2 * len(self.sources) - 2)
        self._heap_spans()

    def take(self) -> int:
        """Returns the source whose turn it is."""
        self._turn += 1
        # Not the source that is furthest behind: that greedy choice keeps no such bound.
        while self._waiting and self._waiting[0][0] <= self._turn:
            _, due, source = heappop(self._waiting)
            heappush(self._ready, (due, source))
        _, chosen = heappop(self._ready)
        self.taken[chosen] += 1
        heappush(self._waiting, self._span(chosen))
        return chosen

    def pass_cycles(self, count: int) -> None:
        """Take the turns of `count` whole cycles at once."""
        self._turn += count * self.cycle
        for source in self.sources:
            self.taken[source] += count * self.shares[source]
        self._heap_spans()

    def _heap_spans(self) -> None:
        """Set up the sources that may not come yet, by their first turn, and those that may, by the turn before which.

        Heaps, so that a turn among many sources costs the logarithm of their number.
        """
        self._waiting = [self._span(source) for source in self.sources]
        heapify(self._waiting)
        self._ready: list[tuple[int, int]] = []

    def _span(self, source: int) -> tuple[int, int, int]:
        """Returns the turns between which the next one of `source` must lie, and the source."""
        m, taken = self._m, self.taken[source] * self._m
        scaled = m * self.shares[source]
        opens = -(-self.cycle * (taken + 1) // scaled)
        return opens, self.cycle * (taken + m - 1) // scaled + 1, source


class SampleOrder:
    """The samples of a mixture, as (source, number in it): without end, or until the sources are used up.

    Sources take turns (see `Turns`) by the shares of the phase, without those that have reached their limit. Within a
    source every epoch is a new permutation.
    """

    def __init__(
        self,
        sizes: Sequence[int | None],
        names: Sequence[str],
        phases: Sequence[tuple[int, Sequence[int]]],
        limits: Sequence[int | None],
        seed: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts at the first sample, or continues from `state`; sources absent from it start at their first sample.

        `sizes` has None for a stream, which is read in its own order, and `limits`, the most samples that each source
        yields in all, None for no limit. `phases`: first sample and shares of each, the first from sample 0 on.
        """
        state = state or {"drawn": 0, "sources": {}}
        # By name, since the job of a continued run may have its sources in another order, or other ones.
        saved = {name: state["sources"].get(name, {"drawn": 0, "share": 0, "turns": 0}) for name in names}
        self.counts = [source["drawn"] for source in saved.values()]
        """Samples drawn so far from each source."""
        self.drawn: int = state["drawn"]
        """Samples drawn so far in all, including those from sources that the job no longer has."""
        self._sizes, self._names, self._phases, self._limits, self._seed = sizes, names, phases, limits, seed
        self._permutations: dict[int, tuple[int, Permutation]] = {}
        self._turns = Turns([s["share"] for s in saved.values()], [s["turns"] for s in saved.values()])
        # Without one that took turns, they are counted afresh, as at any change of shares.
        if any(source["share"] and name not in saved for name, source in state["sources"].items()):
            self._turns = Turns([0] * len(sizes))
        self._settle()

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self

    def __next__(self) -> tuple[int, int]:
        if not self._turns.sources:
            raise StopIteration
        source = self._turn()
        number, size = self.counts[source] - 1, self._sizes[source]
        if size is None:
            return source, number
        epoch, position = divmod(number, size)
        return source, self._permutation(source, size, epoch)[position]

    def advance(self, samples: int) -> int:
        """Skips samples and returns how many were skipped: fewer than `samples` if the sources are used up."""
        left = samples
        while left and (turns := self._turns).sources:
            left -= self._pass_cycles(left)
            while left and self._turns is turns:
                self._turn()
                left -= 1
        return samples - left

    def _pass_cycles(self, samples: int) -> int:
        """Skips whole cycles of turns, short of where shares change; returns how many samples were skipped."""
        turns, columns = self._turns, zip(self._turns.shares, self.counts, self._limits, strict=True)
        rooms = [samples // turns.cycle]
        if self._next_phase is not None:
            rooms.append((self._next_phase - 1 - self.drawn) // turns.cycle)
        rooms += [(limit - 1 - count) // share for share, count, limit in columns if share and limit is not None]
        cycles = min(rooms)
        if not cycles:
            return 0
        turns.pass_cycles(cycles)
        for source in turns.sources:
            self.counts[source] += cycles * turns.shares[source]
        self.drawn += cycles * turns.cycle
        return cycles * turns.cycle

    def state(self) -> dict[str, Any]:
        """Returns the position as plain JSON: two integers a source, on which a new `SampleOrder` continues."""
        columns = zip(self.counts, self._sizes, self._turns.shares, self._turns.taken, strict=True)
        sources = [dict(zip(("drawn", "size", "share", "turns"), values, strict=True)) for values in columns]
        return {"drawn": self.drawn, "sources": dict(zip(self._names, sources, strict=True))}

    def _turn(self) -> int:
        source = self._turns.take()
        self.counts[source] += 1
        self.drawn += 1
        if self.drawn == self._next_phase or self.counts[source] == self._limits[source]:
            self._settle()
        return source

    def _settle(self) -> None:
        """Take turns by the shares that hold from here on."""
        shares = next(shares for first, shares in reversed(self._phases) if first <= self.drawn)
        columns = zip(shares, self.counts, self._limits, strict=True)
        left = smallest([0 if limit is not None and count >= limit else share for share, count, limit in columns])
        # A phase that changes no share must not disturb the turns.
        if left != self._turns.shares:
            self._turns = Turns(left)
        self._next_phase = next((first for first, _ in self._phases if first > self.drawn), None)

    def _permutation(self, source: int, size: int, epoch: int) -> Permutation:
        cached = self._permutations.get(source)
        if cached is None or cached[0] != epoch:
            # The name and not the number: a source that is added or moved leaves the order of the others as it was.
            cached = epoch, Permutation(size, f"{self._seed}:{self._names[source]}:{epoch}")
            self._permutations[source] = cached
        return cached[1]


def sample_order(job: Job, sizes: Sequence[int | None], progress: Progress | None = None) -> SampleOrder:
    """Returns the order of a job's samples, from its start or from `progress` on."""
    seed = job.job.seed if job.data.seed is None else job.data.seed
    state = progress.samples if progress else None
    return SampleOrder(sizes, source_names(job), phase_shares(job, progress), limits(job, sizes), seed, state)


def sizes_of(datasets: Sequence[Dataset | Stream]) -> list[int | None]:
    """Returns the sequences in each source; None for a stream, whose length is unknown."""
    return [len(dataset) if isinstance(dataset, Sized) else None for dataset in datasets]


def phase_shares(job: Job, progress: Progress | None = None) -> list[tuple[int, list[int]]]:
    """Returns first sample and shares of each phase, beginning with the time before the first one."""
    step, drawn = position_of(progress)
    tokens = progress.tokens if progress else 0
    samples = [sample_of(first_step(phase, job, step, tokens, drawn), job, progress) for phase in job.data.phases]
    shares = [whole_shares(weights, job.data.temperature) for weights in phase_weights(job)]
    return list(zip((0, *samples), shares, strict=True))


def sample_of(step: int, job: Job, progress: Progress | None = None) -> int:
    """Returns the number of the first sample after `step` completed steps."""
    # Counted from `progress`: before it, batches may have had another size than the job's.
    done, drawn = position_of(progress)
    return job.train.sample_after(step - done, drawn)


def position_of(progress: Progress | None) -> tuple[int, int]:
    """Completed steps, and the samples drawn in them."""
    return (progress.step, progress.samples.get("drawn", 0)) if progress else (0, 0)


def limits(job: Job, sizes: Sequence[int | None]) -> list[int | None]:
    """Returns the most sequences that each source yields in the whole run; None if it is not limited."""
    # In decimals: 0.29 epochs of 100 sequences are 29, though as floats they are a little less.
    return [
        math.floor(Fraction(repr(source.max_epochs)) * size) if source.max_epochs and size is not None else None
        for source, size in zip(job.data.sources, sizes, strict=True)
    ]


class Stretch(NamedTuple):
    """The sequences, as fractions, that one phase takes from the sources for its samples [first, end)."""

    first: int
    end: int
    taken: list[Fraction]
    """From each source; together less than the phase needs if they are used up."""
    spare: float
    """Sequences that its sources have left; negative if they are used up."""


def stretches(job: Job, sizes: Sequence[int | None], progress: Progress | None = None) -> Iterator[Stretch]:
    """Yields the phases of a run, from its start or from `progress` on."""
    # By arithmetic: a run of a billion samples would take a quarter of an hour to count.
    order = sample_order(job, sizes, progress)
    left = [
        math.inf if limit is None else Fraction(max(0, limit - count))
        for limit, count in zip(limits(job, sizes), order.counts, strict=True)
    ]
    phases = (*phase_shares(job, progress), (sample_of(job.train.steps, job, progress), []))
    for (first, shares), (end, _) in pairwise(phases):
        need = end - max(first, order.drawn)
        if need > 0:
            taken = _pour(shares, left, need)
            spare = float(sum(available for available, share in zip(left, shares, strict=True) if share) - need)
            left = [available - count for available, count in zip(left, taken, strict=True)]
            yield Stretch(end - need, end, taken, spare)


def _pour(shares: Sequence[int], left: Sequence[Fraction | float], need: int) -> list[Fraction]:
    """Returns the sequences from each source, by its share; the others make up for those that are used up."""
    taken = [Fraction(0)] * len(shares)
    missing = Fraction(need)
    while missing and (active := [i for i, share in enumerate(shares) if share and left[i] > taken[i]]):
        total = sum(shares[i] for i in active)
        until_used_up = [(left[i] - taken[i]) * total / shares[i] for i in active if left[i] != math.inf]
        part = Fraction(min([missing, *until_used_up]))
        for i in active:
            taken[i] += part * shares[i] / total
        missing -= part
    return taken


def expected_draws(job: Job, sizes: Sequence[int | None]) -> list[float]:
    """Returns the sequences that a whole run takes from each source, to within a few."""
    return [float(sum(column)) for column in zip(*(stretch.taken for stretch in stretches(job, sizes)), strict=True)]


def check_supply(job: Job, sizes: Sequence[int | None], progress: Progress | None = None) -> None:
    """Raises JobError for a source that is empty or too small for one batch, and for limits that leave too little."""
    if problems := list(_source_problems(job, sizes)) or list(_shortage_problems(job, sizes, progress)):
        raise JobError(problems)


def _source_problems(job: Job, sizes: Sequence[int | None]) -> Iterator[Problem]:
    batch = job.train.global_batch_size
    phases = [[batch * share // sum(shares) for share in shares] for _, shares in phase_shares(job)]
    most_in_a_batch = map(max, zip(*phases, strict=True))
    columns = zip(job.data.sources, sizes, limits(job, sizes), most_in_a_batch, strict=True)
    for number, (source, size, limit, most) in enumerate(columns):
        path = f"data.sources.{number}"
        if size is None and source.max_epochs:
            yield Problem(f"{path}.max_epochs", "is a stream, which has no epochs to count; leave max_epochs out")
        elif limit == 0 and is_drawn(job, number):
            yield Problem(
                f"{path}.max_epochs",
                f"{source.max_epochs:g} epochs of its {size:,} sequences are less than one sequence; raise it, or set "
                "weight = 0",
            )
        elif size is not None and size < (most if limit is None else min(most, limit)):
            yield Problem(
                path,
                f"has {size:,} sequences, and a step takes {most:,} from it: it would train on some of them twice; add "
                "data, lower train.global_batch_size, or shorten train.seq_len",
            )


def _shortage_problems(job: Job, sizes: Sequence[int | None], progress: Progress | None) -> Iterator[Problem]:
    """Yields a problem for the first phase in which sources run out."""
    phases = list(stretches(job, sizes, progress))
    # Sources are within one sequence of their shares, so with several phases the sum is exact to within a few only.
    # Only if these decide, the run's turns are taken one by one.
    doubt = 2 * len(sizes) * (len(phases) + len(sizes)) if len(phases) > 1 else 0
    if any(abs(phase.spare) < doubt for phase in phases):
        order = sample_order(job, sizes, progress)
        order.advance(phases[-1].end - order.drawn)
        shortages = [(phase, order.drawn - phase.first) for phase in phases if order.drawn < phase.end]
    else:
        shortages = [(phase, math.floor(sum(phase.taken))) for phase in phases if phase.spare < 0]
    done, drawn = position_of(progress)
    columns = zip(source_names(job), job.data.sources, sizes, limits(job, sizes), strict=True)
    rows = [
        f"{name} {limit:,} in all ({source.max_epochs:g} x {size:,})"
        for name, source, size, limit in columns
        if limit is not None
    ]
    for short, available in shortages[:1]:
        need = short.end - short.first
        yield Problem(
            "data.sources",
            f"steps {done + job.train.steps_until(short.first, drawn) + 1:,} to "
            f"{done + job.train.steps_until(short.end, drawn):,} need {need:,} sequences, "
            f"but max_epochs leaves {available:,} for them: {', '.join(rows)}; "
            "raise max_epochs (0 is no limit), give weight to another source, or lower train.steps",
        )


def source_changes(
    state: Mapping[str, Any], sizes: Mapping[str, int | None], identities: Mapping[str, str] = {}
) -> list[str]:
    """Returns a message for each difference between the sources and the `state` from `TrainLoader.state()`.

    `sizes` has the number of sequences of each source by its name, None for a stream; for `identities`, see
    `HasIdentity`.
    """
    saved: Mapping[str, Mapping[str, Any]] = state.get("sources", {})
    new = [f"source {name!r} is new" for name in sizes if saved and name not in saved]
    gone = [f"source {name!r} is gone, after {saved[name]['drawn']:,} sequences" for name in saved if name not in sizes]
    common = {name: source for name, source in saved.items() if name in sizes}
    changed = {name: _difference(source, sizes[name], identities.get(name)) for name, source in common.items()}
    return [*new, *gone, *(f"source {name!r} {message}" for name, message in changed.items() if message)]


def _difference(saved: Mapping[str, Any], size: int | None, identity: str | None) -> str:
    if not saved["drawn"]:  # nothing of it was used, so it may have any size and content
        return ""
    if saved["size"] != size:
        return f"had {saved['size']} sequences and has {size}"
    # Either may be unknown: older checkpoints hold no identities, and not every source has one.
    before = saved.get("identity")
    return "has another content than it had" if before and identity and before != identity else ""
