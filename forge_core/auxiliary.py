"""Auxiliary losses, metrics and counts that arise inside modules.

A module attaches an auxiliary loss where it arises, and the gradient joins the backward pass there: nothing needs to be
carried to the loss, so it works the same in every pipeline stage, under recomputation and under compile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

Unit = Literal["token", "sequence", "document", "example", "layer"]
"""What a mean is over. `document`: of one row, so that one that continues in another row counts there once more.
`example`: what the data declare by an entry `examples` of batches, a sequence without it."""


class Count(NamedTuple):
    """Key of a count."""

    name: str
    row: int
    """Number of the layer."""


Summary = Callable[[Mapping[int, Tensor]], Mapping[str, Tensor]]
"""Counts of a name, by row, to metrics."""


class _Attach(torch.autograd.Function):
    """Identity on `x` whose backward also sends a gradient of one into `loss`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones((), dtype=ctx.dtype)


class Counter:
    """Sums values over the forward passes of a step, or keeps the largest; see `Auxiliary.counter`."""

    def __init__(self, auxiliary: Auxiliary, unit: Unit | None, *, largest: bool = False) -> None:
        self._auxiliary = auxiliary
        self.unit, self.largest = unit, largest
        self.empty = -torch.inf if largest else 0.0
        self.total: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """Add `values` (n,), as `Auxiliary.count` does."""
        if not self._auxiliary.active or self._auxiliary.recomputing:
            return
        # Made only now that its size is known. Float64 holds every count exactly; float32 ends at 2**24.
        if self.total is None:
            self.total = torch.full(values.shape, self.empty, device=self._auxiliary.device, dtype=torch.float64)
        update = self.total.clamp_ if self.largest else self.total.add_  # the former's first argument is the minimum
        update(values.detach())


class Auxiliary:
    """Collects the values that modules attach in their forward pass. One object per run: `context.auxiliary`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recomputing = False
        self.active = False
        # Tensors, not numbers: the count of valid tokens is on the device, and reading it would wait for the device.
        self._scale = {unit: torch.zeros((), device=device, dtype=torch.float64) for unit in get_args(Unit)}
        self._counters: dict[str | Count, Counter] = {}
        """One for each metric, by name, and for each count."""
        self._counted: Mapping[Count, Tensor] = {}
        self._kept: Tensor | None = None
        self._summaries: dict[str, Summary] = {}

    def begin_step(
        self,
        tokens: Tensor,
        sequences: int,
        micro_batches: int,
        examples: Tensor | int | None = None,
        documents: Tensor | int | None = None,
    ) -> None:
        """Start a training step.

        Args:
            tokens: () valid tokens of the global batch.
            sequences: rows of the global batch.
            micro_batches: over all ranks.
            examples: of the global batch; None: one per row.
            documents: of the global batch; None: one per row.
        """
        examples, documents = (sequences if count is None else count for count in (examples, documents))
        counts = (tokens, sequences, documents, examples, micro_batches)
        for unit, count in zip(get_args(Unit), counts, strict=True):
            at_least_one = count.clamp(min=1).double() if isinstance(count, Tensor) else max(count, 1)
            self._scale[unit].fill_(1.0 / at_least_one)
        for counter in self._counters.values():
            if counter.total is not None:
                counter.total.fill_(counter.empty)
        self.active = True

    def end_step(self, counted: Mapping[Count, Tensor]) -> None:
        """End the step's forward passes, with the counts over all ranks: until `begin_step`, nothing counts."""
        self.active = False
        self._counted, self._kept = counted, None

    def attach(self, x: Tensor, value: Tensor, *, unit: Unit, name: str, weight: float = 1.0) -> Tensor:
        """Add `weight * value / count(unit)` to the training objective; returns `x`, to be used in its place.

        Args:
            x: any tensor on the path to the loss.
            value: (), float32 or wider, a *sum* over `unit`: over tokens, sequences, … of this micro-batch.
            unit: the unit that the sum runs over. It is counted over the global batch, so that the objective does not
                depend on micro-batches or ranks. `layer`: a value that is the same in every micro-batch, counted once.
            name: metric under which the mean is logged, unweighted; values of one name add up over layers.
            weight: factor in the objective.
        """
        if not self.active:
            return x
        self.metric(name, value, unit)
        if not torch.is_grad_enabled() or not value.requires_grad:
            return x
        # Scaled here, as the loss is, so that plain sums over micro-batches and ranks make the whole gradient.
        return _Attach.apply(x, value * (self._scale[unit].to(value.dtype) * weight))

    def metric(self, name: str, value: Tensor, unit: Unit | None = None) -> None:
        """Add `value` to the metric `name` of this step: a sum, divided by the global count of `unit` if given."""
        if self.active:
            # One element and not a scalar: torch 2.13's AOT backends drop in-place changes to a scalar on the CPU.
            self._counters.setdefault(name, Counter(self, unit)).add(value.reshape(1))

    def count(self, name: str, row: int, values: Tensor, unit: Unit | None = None) -> None:
        """Add `values` (n,) to the step's counts of n things in layer `row`, such as the tokens of experts.

        The sum is divided by the global count of `unit`, if given; `layer`: values the same in every micro-batch.
        """
        self.counter(name, row, unit).add(values)

    def counter(self, name: str, row: int, unit: Unit | None = None, *, largest: bool = False) -> Counter:
        """The counter that `count` adds to, for a layer to keep.

        A forward pass that contained the layer's number would need a separate compiled graph for each layer.

        Args:
            name: of the counts.
            row: number of the layer.
            unit: as for `count`.
            largest: whether the counter keeps the largest of values over the forward passes of the step and over all
                ranks, the tensor-parallel ones among them, and not their sum. -inf: no value.
        """
        return self._counters.setdefault(Count(name, row), Counter(self, unit, largest=largest))

    def summarise(self, name: str, summary: Summary) -> None:
        """Log metrics made of all counts of a name; replaces an earlier summary.

        `summary` maps {row: (n,)}, of a complete step and over all ranks, to {metric: ()}.
        """
        self._summaries[name] = summary

    def summaries(self) -> Mapping[str, Tensor]:
        """Metrics that `summarise` declared, of the last complete step."""
        metrics: dict[str, Tensor] = {}
        for name, summary in self._summaries.items():
            rows = {count.row: values for count, values in sorted(self._counted.items()) if count.name == name}
            metrics |= summary(rows) if rows else {}
        return metrics

    def forget_counted_unless(self, kept: Tensor) -> None:
        """Let `counted` return zeros unless the update was `kept` (), bool on the device; logged values stay."""
        self._kept = kept  # multiplied in when asked for: reading it here would wait for the device

    def counted(self, name: str, row: int) -> Tensor:
        """Returns the counts of the last complete step over all ranks: (n,), float64."""
        values = self._counted[Count(name, row)]
        return values if self._kept is None else values.where(self._kept, 0.0)

    def largest(self) -> dict[str | Count, Tensor]:
        """This rank's values of the counters that keep the largest ones: (n,) each, still to be compared over ranks."""
        return {
            key: counter.total.clone()
            for key, counter in self._counters.items()
            if counter.largest and counter.total is not None
        }

    def totals(self) -> dict[str | Count, Tensor]:
        """This rank's share of each metric (), and of each count (n,), still to be summed over the token ranks."""
        shares: dict[str | Count, Tensor] = {}
        for key, counter in self._counters.items():
            if counter.total is not None and not counter.largest:
                total = counter.total if isinstance(key, Count) else counter.total[0]
                shares[key] = total * self._scale[counter.unit] if counter.unit else total.clone()
        return shares
