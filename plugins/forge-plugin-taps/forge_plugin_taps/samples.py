"""What sinks receive: the sampled activations of one step.

Shapes: R sequences of a global batch, n sampled positions of each, N = R n samples, m of them on a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

if TYPE_CHECKING:
    from forge_plugin_taps.recorder import Capture
    from forge_plugin_taps.where import Split

TOKENS = ("step", "row", "position", "id", "label", "document", "source", "sequence")
"""What is known of each sample. `row`: number of its sequence in the global batch; `position`: in that sequence; `id`
and `label`: token and target; `document`: the batch's id of its document; `source`: number of the sequence's source;
`sequence`: its number in that source."""


@frozen
class LocalPart:
    """The values of a point that this rank has."""

    values: Tensor
    """(m, …) on the device, in ascending order of `index`."""
    index: Tensor
    """(m,) int64 on the CPU: number of each among the N samples."""
    split: Split | None
    """The part of a dimension of `values` that this rank of tensor parallel has; None: it has all."""
    counted: bool
    """Whether a sum over all ranks shall take these: of several ranks with equal values, one has it set."""


@frozen
class Part:
    """What other ranks know of a rank's part."""

    rank: int
    shape: tuple[int, ...]
    """Of one sample."""
    dtype: torch.dtype
    split: Split | None
    counted: bool


class Sample:
    """The samples of one step, ordered by row, then position.

    `gather` is collective. What a sink keeps after `Sink.consume` it copies.
    """

    def __init__(self, capture: Capture, step: int, points: Sequence[str], tokens: Mapping[str, Tensor]) -> None:
        self._capture = capture
        self.step = step
        """Number of the step, from 1, as in its line of metrics."""
        self.points = tuple(points)
        """Names of points, the same on every rank."""
        self.tokens = tokens
        """`TOKENS` by name: (N,) int64 each, on the CPU, equal on every rank."""

    def __len__(self) -> int:
        return len(self.tokens["id"])

    def of(self, points: Sequence[str]) -> Sample:
        """Returns the same samples at some of the points."""
        return Sample(self._capture, self.step, points, self.tokens)

    def local(self, name: str) -> LocalPart | None:
        """Returns this rank's values of a point; None if it has none, as in a pipeline."""
        return self._capture.local(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a point's tensor, whole: (N, …); the same on every rank."""
        part = self._capture.parts(name)[0]
        return (len(self), *_whole(part))

    def gather(self, name: str, to: int | None = None) -> Tensor | None:
        """Returns the whole tensor of a point, in order: (N, …). Collective.

        Args:
            name: of the point.
            to: the only rank that gets it; None is returned on the others. By default every rank gets it.
        """
        parts, rank = self._capture.parts(name), _rank()
        target = 0 if to is None else to
        whole = None
        if rank == target or to is None:
            whole = torch.empty(self.shape(name), dtype=parts[0].dtype, device=self._capture.device)
        for part in parts:
            self._send(name, part, target, whole)
        if to is None and dist.is_initialized() and dist.get_world_size() > 1:
            assert whole is not None
            dist.broadcast(whole, target)
        return whole

    def _send(self, name: str, part: Part, target: int, whole: Tensor | None) -> None:
        """Bring the values of a rank into the whole tensor of the target rank."""
        rank, index = _rank(), self._capture.index(name, part.rank)
        if rank == part.rank:
            own = self.local(name)
            assert own is not None
            if rank != target:
                dist.send(own.values.contiguous(), target)
                return
            values = own.values
        elif rank == target:
            values = torch.empty((len(index), *part.shape), dtype=part.dtype, device=self._capture.device)
            dist.recv(values, part.rank)
        else:
            return
        assert whole is not None
        if part.split is not None:
            whole = whole.narrow(1, part.split.offset, part.split.length)
        whole.index_copy_(0, index.to(whole.device, non_blocking=True), values)


def _whole(part: Part) -> tuple[int, ...]:
    return part.shape if part.split is None else (part.split.size, *part.shape[1:])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
