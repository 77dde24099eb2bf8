"""What sinks receive: the sampled activations of one step. Shapes: N samples, m of them on a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from forge_core.parallel.mesh import global_rank

if TYPE_CHECKING:
    from forge_plugin_taps.capture import Capture, Part
    from forge_plugin_taps.where import Split


@frozen
class LocalPart:
    """The values of a point that this rank has."""

    values: Tensor
    """(m, …) on the device."""
    index: Tensor
    """(m,) int64 on the CPU: number of each among the N samples."""
    split: Split | None
    """The heads or features of dimension 1 of `values` that this rank of tensor parallel has; None: it has all."""
    counted: bool
    """Whether a sum over all ranks shall take these: of several ranks with equal values, one has it set."""


class Sample:
    """The samples of one step, ordered by row, then position.

    It may be used until the next sampled step ends; what a sink keeps longer it copies.
    """

    def __init__(self, capture: Capture, points: Sequence[str]) -> None:
        self._capture = capture
        self.step = capture.step
        """Number of the step, from 1, as in its line of metrics."""
        self.points = tuple(points)
        """Names of points that have values in this step, the same on every rank."""

    def __len__(self) -> int:
        return self._capture.samples

    @property
    def tokens(self) -> Mapping[str, Tensor]:
        """`TOKENS` by name: (N,) int64 each, on the CPU, equal on every rank.

        Collective on the first access, so every rank must access it. It waits for the copy of the step's ids.
        """
        return self._capture.tokens

    def of(self, points: Sequence[str]) -> Sample:
        """Returns the same samples at the given points that have values."""
        return Sample(self._capture, [name for name in points if name in self.points])

    def local(self, name: str) -> LocalPart | None:
        """Returns this rank's values of a point; None if it has none, as in a pipeline."""
        part = self._capture.own_part(name)
        if part is None:
            return None
        values = self._capture.values(name, part.at_rest)
        return LocalPart(values, self._capture.index(part), part.split, part.counted)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a point's whole tensor, (N, …); the same on every rank.

        Raises:
            ForgeError: nothing passed the point in this step, on any rank.
        """
        part = self._capture.parts(name)[0]
        return (len(self), *(part.shape if part.split is None else (part.split.size, *part.shape[1:])))

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a point's values; the same on every rank."""
        return self._capture.parts(name)[0].dtype

    def gather(self, name: str, to: int | None = None) -> Tensor | None:
        """Returns the whole tensor of a point on the device, in order: (N, …). Collective.

        Args:
            name: of the point.
            to: the only rank that gets it; None is returned on the others. By default every rank gets it.
        """
        parts, target = self._capture.parts(name), 0 if to is None else to
        whole = None
        if to is None or global_rank() == target:
            whole = torch.empty(self.shape(name), dtype=self.dtype(name), device=self._capture.device)
        # One rank after the other: point-to-point messages are matched by their order
        for part in parts:
            self._bring(name, part, target, whole)
        if to is None and whole is not None and dist.is_initialized() and dist.get_world_size() > 1:
            # Once it is whole, so that each part is sent to one rank alone
            dist.broadcast(whole, target)
        return whole

    def _bring(self, name: str, part: Part, target: int, whole: Tensor | None) -> None:
        """Bring the values of a rank into the whole tensor of the target rank."""
        rank, index = global_rank(), self._capture.index(part)
        if rank == part.rank:
            values = self._capture.values(name, part.at_rest)
            if rank != target:
                dist.send(values.contiguous(), target)
                return
        elif rank == target:
            values = torch.empty((len(index), *part.shape), dtype=part.dtype, device=self._capture.device)
            dist.recv(values, part.rank)
        else:
            return
        assert whole is not None
        room = whole if part.split is None else whole.narrow(1, part.split.offset, part.split.length)
        # By number, as a rank of context parallel has some positions of each sequence
        room.index_copy_(0, index.to(room.device, non_blocking=True), values)
