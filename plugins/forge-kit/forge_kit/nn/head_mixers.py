"""Mixers of positions other than attention: the interface between linear attention, or a scan, and `cp`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.data import Batch


@runtime_checkable
class MixesHeads(Protocol):
    """A module of `Model.sequence_mixers` that computes each head from all positions of that head alone.

    Under `cp`, by any of its methods, ranks exchange positions for heads: the module is called with whole sequences of
    some of its heads, and its results are exchanged back. All that depends on other positions is inside of it,
    convolutions included. It keeps packed documents apart itself. What all heads share is passed once for each rank:
    see `sharing_ranks`.
    """

    mixes_heads: bool
    """True."""

    def __call__(self, tensors: Sequence[Tensor], per_head: Sequence[Tensor], batch: Batch, *further: Any) -> Tensor:
        """Returns (B, S, H, …).

        Args:
            tensors: (B, S, heads, …), of this rank's heads; the ranks of `cp` divide the heads of each.
            per_head: parameters (heads, …), divided likewise.
            batch: `document_ids` (B, S), if documents are apart.
            further: a cache, in generation: by the module itself, on every rank of `cp`.
        """
        ...


def sharing_ranks(mixer: Any) -> int:
    """Returns how many ranks divide the heads of a layer's mixer, as it is now: 1 without `cp`, and in generation.

    A tensor or parameter that all heads need, such as keys of a single head, is expanded to as many equal heads: each
    rank then gets one, of all positions.
    """
    return int(getattr(mixer, "ranks", 1))
