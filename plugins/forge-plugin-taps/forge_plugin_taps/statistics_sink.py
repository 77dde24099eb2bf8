"""Statistics of activations, added up over ranks.

Shapes: N samples of a step, m of them on this rank, U units of a point, u of them on this rank, P points, K bins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import Tensor

from forge_core.metrics.jsonl import JsonLines
from forge_core.parallel.mesh import global_rank, world_size
from forge_plugin_taps.kinds import Sink
from forge_plugin_taps.statistics import PATTERN, SCALARS

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_plugin_taps.kinds import TapsInfo
    from forge_plugin_taps.samples import LocalPart, Sample
    from forge_plugin_taps.statistics import Statistics


FIRST = 3
"""Number of sums of a point that precede the sums of its samples."""


@frozen(eq=False)
class Own:
    """What this rank has of a point, in float64."""

    values: Tensor
    """(m, u)"""
    index: Tensor
    """(m,) numbers of the samples, on the device."""
    first: int
    """Number of the first unit."""
    counted: bool


class StatisticsSink(Sink):
    """See `Statistics`. Three collectives a sampled step, whatever the number of points."""

    def __init__(self, settings: Statistics, context: BuildContext, taps: TapsInfo) -> None:
        self.settings, self.context = settings, context
        self.units: dict[str, int] = {}
        """U of each point."""
        self.heads: dict[str, int] = {}
        """Heads of each point that is attention, of which alone there is an entropy."""
        self._patterns = {name for name, point in taps.points.items() if point.axes == PATTERN}
        self.edges = torch.tensor(settings.edges, dtype=torch.float64, device=context.device)
        self.logged: dict[str, Tensor] = {}
        self._lines: Any = None
        self._pending: tuple[int, Sequence[str], Tensor] | None = None
        """Step, points and their figures (P, scalars + K), which are being copied to the host."""

    def start(self, step: int) -> None:
        """Opens the file on rank 0, without lines of steps after `step`."""
        folder = self.context.folder
        self._pending = None
        self.close(final=False)  # in a roll-back, the file is open
        if folder is not None and global_rank() == 0:
            (folder / self.settings.file).parent.mkdir(parents=True, exist_ok=True)
            self._lines = JsonLines(file=self.settings.file).build(self.context)
            self._lines.start(step)

    def consume(self, sample: Sample) -> None:
        """Computes the figures of a step on the device; their copy to the host is not waited for. Collective."""
        self.logged = {}
        names = sample.points  # of the step: nothing may have passed one, such as a tower without an image
        if not names:
            return
        own = {name: _own(part) for name in names if (part := sample.local(name)) is not None}
        shapes = {name: sample.shape(name) for name in names}
        self.units = {name: math.prod(shape[1:]) for name, shape in shapes.items()}
        self.heads = {name: shapes[name][1] for name in names if name in self._patterns}
        sums = self._all_reduce({name: self._sums(own.get(name), len(sample), name in self.heads) for name in names})
        largest = self._all_reduce({name: self._largest(own.get(name), self.units[name]) for name in names}, "MAX")
        means = {name: sums[name][1] / self._count(name, sample) for name in names}
        # A second pass over the values, as central moments need the mean of all ranks first
        powers = self._all_reduce({name: _central(own.get(name), means[name]) for name in names})
        counts = {name: self._count(name, sample) for name in names}
        points = {name: self._figures(sums[name], largest[name], powers[name], counts[name]) for name in names}
        for name, heads in self.heads.items():
            points[name][0][SCALARS.index("entropy")] /= len(sample) * heads
        chosen = [(name, key) for name in names for key in self.settings.log if self._has(name, key)]
        self.logged = {f"taps/{name}/{key}": points[name][0][SCALARS.index(key)] for name, key in chosen}
        if self._lines is not None:
            figures = torch.stack([torch.cat(parts) for parts in points.values()])
            # Read in `settle`: the step does not wait for the copy
            self._pending = sample.step, names, figures.to("cpu", non_blocking=True)
            self._copied = torch.get_device_module(self.context.device).Event()
            self._copied.record()

    def settle(self) -> None:
        """Writes the line of the last sampled step, whose copy has arrived by now. Rank 0 only."""
        pending, self._pending = self._pending, None
        if pending is not None:
            # The copy was made without a wait, and the host must not read its memory before it has ended
            self._copied.synchronize()
            self._write(*pending)

    def metrics(self) -> Mapping[str, float | Tensor]:
        """Returns the scalars that `log` names, on the device; they were reduced, so every rank has the same."""
        return self.logged

    def close(self, final: bool) -> None:
        """Closes the file; `settle` has written the last line before."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _has(self, name: str, scalar: str) -> bool:
        return scalar != "entropy" or name in self.heads

    def _count(self, name: str, sample: Sample) -> int:
        return len(sample) * self.units[name]

    def _sums(self, own: Own | None, samples: int, attention: bool) -> Tensor:
        """(FIRST + N + K): values that are not finite, sum, entropies, squared norm of each sample, histogram."""
        sums = self._zeros(FIRST + samples + len(self.edges) + 1)
        if own is not None and own.counted:
            sums[0] = (~own.values.isfinite()).sum()
            sums[1] = own.values.sum()
            if attention:
                sums[2] = torch.special.entr(own.values).sum()  # -x log x, and 0 of 0
            sums[FIRST + own.index] = own.values.square().sum(1)
            # By adding ones, and zeros for non-finite values: a selection, or `bincount`, would wait for the device
            bins = torch.bucketize(own.values.nan_to_num().flatten(), self.edges)
            sums[FIRST + samples :].scatter_add_(0, bins, own.values.isfinite().double().flatten())
        return sums

    def _largest(self, own: Own | None, units: int) -> Tensor:
        """(U): the largest absolute value of each unit; -1 where this rank has none."""
        # Below every absolute value, so that the maximum over ranks ignores it
        largest = self._zeros(units) - 1
        if own is not None and len(own.values):
            largest[own.first : own.first + own.values.shape[1]] = own.values.abs().amax(0)
        return largest

    def _zeros(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.float64, device=self.context.device)

    def _all_reduce(self, parts: Mapping[str, Tensor], operation: str = "SUM") -> dict[str, Tensor]:
        # All points in one reduction
        whole = torch.cat(list(parts.values()))
        if world_size() > 1:
            torch.distributed.all_reduce(whole, getattr(torch.distributed.ReduceOp, operation))
        return dict(zip(parts, whole.split([len(part) for part in parts.values()]), strict=True))

    def _figures(self, sums: Tensor, largest: Tensor, powers: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """`SCALARS` in order, of which the entropy is still a sum, and the histogram."""
        bins = len(self.edges) + 1
        variance = powers[0] / count
        kurtosis = torch.where(variance > 0, powers[1] / count / variance.square(), math.nan)
        dead = (largest <= self.settings.dead_below).double().mean()
        norm = sums[FIRST:-bins].sqrt().mean()
        scalars = [norm, sums[1] / count, variance, kurtosis, largest.max(), dead, sums[0], sums[2]]
        return torch.stack(scalars), sums[-bins:]

    def _write(self, step: int, names: Sequence[str], figures: Tensor) -> None:
        lines = {}
        for name, row in zip(names, figures.tolist(), strict=True):
            scalars = {key: value for key, value in zip(SCALARS, row, strict=False) if self._has(name, key)}
            lines[name] = {
                # JSON has no number that is infinite or NaN
                **{key: value if math.isfinite(value) else str(value) for key, value in scalars.items()},
                "histogram": [int(number) for number in row[len(SCALARS) :]],
            }
        self._lines.log({"step": step, "edges": list(self.settings.edges), "points": lines})


def _own(part: LocalPart) -> Own:
    # float64, so that the order of summation, which depends on the layout, shows in the last digits only
    values = part.values.flatten(1).double()
    # `offset` counts heads or features; flattened, each head has `below` units
    below = math.prod(part.values.shape[2:])
    first = 0 if part.split is None else part.split.offset * below
    return Own(values, part.index.to(values.device), first, part.counted)


def _central(own: Own | None, mean: Tensor) -> Tensor:
    """(2): sums of the second and fourth powers of distances from the mean. Raw moments would cancel each other."""
    if own is None or not own.counted:
        return torch.zeros(2, dtype=torch.float64, device=mean.device)
    squares = (own.values - mean).square()
    return torch.stack([squares.sum(), squares.square().sum()])
