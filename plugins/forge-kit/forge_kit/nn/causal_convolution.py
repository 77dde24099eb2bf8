"""The causal convolution of each feature, which stops at documents, and its cache.

Shapes: B sequences, S positions, … one or more dimensions of features, D a single one, W positions that the convolution
sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch


def numbered(document_ids: Tensor) -> Tensor:
    """Returns the number of each position's document in its row, (B, S): an id that occurs again is another one."""
    return F.pad((document_ids[:, 1:] != document_ids[:, :-1]).cumsum(1), (1, 0))


def causal_convolution(
    x: Tensor, weight: Tensor, documents: Tensor | None = None, before: Tensor | None = None
) -> Tensor:
    """Returns the sum over the last W positions of each feature, (B, S, …).

    Args:
        x: (B, S, …).
        weight: (…, W), the present position's last.
        documents: (B, S), the number of each position's document, which sees no other; None: all are one.
        before: (B, W - 1, …), inputs of the positions before these ones; None: zeros.
    """
    width, length = weight.shape[-1], x.shape[1]
    if before is not None and length == 1:  # a generated token, in as few operations as there are
        return (torch.cat([before, x], 1) * weight.movedim(-1, 0)).sum(1, keepdim=True)
    features = x.ndim - 2
    y = x * weight[..., -1]
    for back in range(1, width):
        if before is None:
            # `pad` counts from the last dimension: zeros come before the positions
            shifted = F.pad(x, (*[0] * (2 * features), back, 0))[:, :length]
        else:
            shifted = torch.cat([before[:, width - 1 - back :], x], 1)[:, :length]
        if documents is not None:
            # -1 is no document: nothing comes from before the row
            same = documents == F.pad(documents, (back, 0), value=-1)[:, :length]
            shifted = shifted * same[(..., *[None] * features)]
        y = y + shifted * weight[..., width - 1 - back]
    return y


class TailCache:
    """The last inputs of a convolution; see `forge_kit.nn.generation.Generates.new_cache`.

    Its rows can be joined, and the positions of the latest call forgotten.
    """

    joinable = True
    forgets = ""

    def __init__(self) -> None:
        self._inputs: Tensor | None = None
        """(B, W - 1 + S, D), of the latest S positions and of those before; None before the first position."""
        self._newest = 0
        """S, less what is forgotten."""

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return 0 if self._inputs is None else self._inputs.nbytes

    def forget(self, count: int) -> None:
        """Drops the newest `count` positions.

        Raises:
            ValueError: the latest call had fewer.
        """
        if count > self._newest:
            raise ValueError(f"{count} positions are to be forgotten, and the latest call had {self._newest}")
        if self._inputs is not None:
            self._inputs = self._inputs[:, : self._inputs.shape[1] - count]
        self._newest -= count

    def convolved(self, x: Tensor, weight: Tensor, batch: Batch) -> Tensor:
        """Returns the convolution of the next positions (B, S, D), and keeps their last inputs."""
        if "positions" in batch:  # padding has a negative position, and counts as nothing
            x = x * (batch["positions"] >= 0)[..., None]
        width = weight.shape[-1]
        if self._inputs is None:
            before = x.new_zeros(len(x), width - 1, x.shape[-1])
        else:
            before = self._tail(self._inputs)
        self._inputs, self._newest = torch.cat([before, x], 1), x.shape[1]
        return causal_convolution(x, weight, before=before)

    def joined(self, parts: Sequence[tuple[TailCache, Tensor]], columns: int, length: int) -> TailCache:
        """Returns a cache of rows of several; `columns` and `length` do not matter here."""
        new = TailCache()
        filled = [(cache, cache._inputs, rows) for cache, rows in parts if cache._inputs is not None]
        tails = [cache._tail(inputs).index_select(0, rows) for cache, inputs, rows in filled]
        new._inputs = torch.cat(tails) if tails else None
        return new

    def _tail(self, inputs: Tensor) -> Tensor:
        """Returns what the next position sees of the earlier ones, (B, W - 1, D)."""
        return inputs[:, self._newest :]


class ConvolutionCore(nn.Module):
    """Convolves each feature by itself; see `forge_kit.nn.head_mixers.MixesHeads`, to which a feature is a head."""

    mixes_heads = True

    def forward(
        self,
        tensors: Sequence[Tensor],
        per_head: Sequence[Tensor],
        batch: Batch,
        cache: TailCache | None = None,
    ) -> Tensor:
        """Returns (B, S, D).

        Args:
            tensors: one, (B, S, D).
            per_head: the weight of the convolution, (D, W).
            batch: `document_ids` (B, S), if documents are apart.
            cache: positions before these ones, which is extended; then each row is one document.
        """
        [x], [weight] = tensors, per_head
        if cache is not None:
            return cache.convolved(x, weight, batch)
        documents = numbered(batch["document_ids"]) if "document_ids" in batch else None
        return causal_convolution(x, weight, documents)
