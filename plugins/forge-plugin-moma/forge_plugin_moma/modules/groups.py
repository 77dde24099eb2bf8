"""Groups of experts, one for each modality. Shapes: B sequences, S positions, E experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor

from forge_plugin_moma.moma import MODALITIES


def is_of(modality: str, ids: Tensor) -> Tensor:
    """(B, S), bool: which positions are of a modality, by `input_ids`."""
    number = MODALITIES.index(modality)
    return ids == -number if number else ids >= 0  # text is number 0: all ids of tokens


@frozen
class Groups:
    """Which experts are of which modality: consecutive ones, in the order of the mapping.

    Nothing here makes a tensor of Python numbers on a device, for which the host would wait.
    """

    sizes: Mapping[str, int]
    """Experts of each modality."""

    @property
    def count(self) -> int:
        """E."""
        return sum(self.sizes.values())

    def closed(self, ids: Tensor) -> Tensor:
        """(B, S), `input_ids`, to (B, S, E), bool: experts of other modalities than the position's."""
        groups = [is_of(name, ids).unsqueeze(-1).expand(*ids.shape, size) for name, size in self.sizes.items()]
        return ~torch.cat(groups, -1)

    def first(self, ids: Tensor) -> Tensor:
        """(B, S), `input_ids`, to the number of the first expert of each position's group; 0 if it has none."""
        first, start = torch.zeros_like(ids), 0
        for name, size in self.sizes.items():
            first = first + is_of(name, ids) * start
            start += size
        return first

    def split(self, values: Tensor) -> Sequence[Tensor]:
        """(…, E) to one tensor for each group."""
        return values.split(list(self.sizes.values()), -1)


def masked(logits: Tensor, closed: Tensor) -> Tensor:
    """Returns logits (B, S, E) of -inf where closed.

    Where all experts of a position are, they are what makes its log Σ exp 0, so that it adds nothing to the z-loss.
    """
    nowhere = closed.all(-1, keepdim=True)
    return logits.masked_fill(closed, -math.inf).masked_fill(nowhere, -math.log(logits.shape[-1]))
