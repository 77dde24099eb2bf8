"""The cache of Gated DeltaNet: a state and the last inputs of the convolutions, whatever the length of a text.

Shapes: B rows, S new positions, H heads, E widths, W positions of a convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_plugin_linear_attention.modules.core import convolve

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch


class StateCache:
    """See `forge_kit.nn.generation.Generates.new_cache`; its rows can be joined (`JoinsRows`)."""

    joinable = True

    def __init__(self) -> None:
        self.state: Tensor | None = None
        """(B, H, K, V), float32 or wider; None before the first position."""
        self.tails: Sequence[Tensor] = ()
        """(B, W - 1, H, E): the last inputs of the convolutions of queries, keys and values."""

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(tensor.nbytes for tensor in (*self.tails, *([] if self.state is None else [self.state])))

    def hide_padding(self, tensors: Sequence[Tensor], batch: Batch) -> tuple[list[Tensor], Tensor | None]:
        """Returns tensors (B, S, H, E) with zeros for padding, and which positions are none: (B, S, 1)."""
        if "positions" not in batch:
            return [*tensors], None
        used = (batch["positions"] >= 0)[..., None]
        return [tensor * used[..., None] for tensor in tensors], used

    def convolved(
        self, tensors: Sequence[Tensor], filters: Sequence[Tensor], biases: Sequence[Tensor | None] = ()
    ) -> list[Tensor]:
        """Returns the convolutions of the next positions, and keeps their last inputs. No `biases`: there are none."""
        if not self.tails:
            pairs = zip(tensors, filters, strict=True)
            self.tails = [x.new_zeros(len(x), w.shape[-1] - 1, *x.shape[2:]) for x, w in pairs]
        arguments = zip(tensors, filters, self.tails, biases or [None] * len(filters), strict=True)
        found = [convolve(x, weight, None, tail, bias) for x, weight, tail, bias in arguments]
        whole = [torch.cat([t, x], 1) for x, t in zip(tensors, self.tails, strict=True)]
        # Not from -W + 1: of a convolution of one position this is -0, which would keep everything
        self.tails = [x[:, x.shape[1] - t.shape[1] :] for x, t in zip(whole, self.tails, strict=True)]
        return found

    def joined(self, parts: Sequence[tuple[StateCache, Tensor]], columns: int, length: int) -> StateCache:
        """Returns a cache of rows of several; `columns` and `length` do not matter here."""
        new = StateCache()
        if self.state is not None:
            states = [cache.state.index_select(0, rows) for cache, rows in parts if cache.state is not None]
            new.state = torch.cat(states)
            every = [[tail.index_select(0, rows) for tail in cache.tails] for cache, rows in parts]
            new.tails = [torch.cat(tails) for tails in zip(*every, strict=True)]
        return new
