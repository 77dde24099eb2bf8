"""Which part of a point's tensor a rank has. Shapes: B sequences, S positions, s positions of this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from forge_core.contracts.errors import ForgeError

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.data import Batch


@frozen
class Split:
    """The heads or features that a tensor-parallel rank has, in the dimension after the positions."""

    offset: int
    length: int
    size: int
    """Length of the whole dimension."""


@frozen
class Where:
    """The activations that an edit receives."""

    point: str
    """Name of the point."""
    axes: str
    """How layouts divide it (`forge_kit.nn.taps.Axes`)."""
    layer: int | None
    split: Split | None
    """The heads or features of this rank; None: it has all."""
    batch: Batch
    """This rank's part of the micro-batch."""
    first: int
    """Number of the first position of x among the batch's positions on this rank (sequence parallel)."""
    outputs: tuple[Any, ...]
    """All that the point's module returns, where the point is one of several outputs."""
    decoding: bool
    """Whether the batch continues the sequences in a cache, so that it specifies its own positions."""

    def places(self, x: Tensor) -> Tensor:
        """Returns the position in the sequence of each of x's (B, s, …): (B, s)."""
        import torch

        rows, length = x.shape[:2]
        if self.decoding and "positions" in self.batch:
            if length != self.batch["input_ids"].shape[1] and not self.first:
                message = f"{self.point} has the keys or values of all positions so far where a cache holds them"
                raise ForgeError(f"{message}; an edit of some positions is made at other points")
            return self.batch["positions"][:, self.first : self.first + length]
        if "places" in self.batch:  # context parallel
            return self.batch["places"][:, self.first : self.first + length]
        return torch.arange(self.first, self.first + length, device=x.device).expand(rows, -1)
