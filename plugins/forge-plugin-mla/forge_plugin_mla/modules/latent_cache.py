"""The cache of latent attention for generation, and attention to it.

Shapes: B sequences, S new positions, T positions so far, H heads, C width of the latent, P width of the key part with
position encoding, N and V the widths of a head's key and value that are projected from the latent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from forge_plugin_transformer.modules.cache import Cache

if TYPE_CHECKING:
    from forge_plugin_mla.modules.latent_attention import Widths


class LatentCache(Cache):
    """Caches C + P numbers per position, whatever the number of heads."""

    def __init__(self, batch_size: int, length: int, window: int = 0) -> None:
        super().__init__(batch_size, length, window)
        # Here and not in the module, as weights do not change during a generation, and do between two
        self._up: Tensor | None = None

    def extend(
        self, latent: Tensor, rope: Tensor, positions: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Append S positions; returns latents and keys' parts (B, T, C + P) of all so far, and the mask (B, 1, S, T).

        Raises:
            ValueError: the cache is full.
        """
        (cached,), mask = self.append([torch.cat([latent, rope], -1)], positions, mask)
        return cached, mask

    def emptied(self, batch_size: int, length: int) -> LatentCache:
        """Keeps the projection of `up_projection`, which is the same for all rows."""
        new = super().emptied(batch_size, length)
        new._up = self._up
        return new

    def up_projection(self, kv_up: nn.Module, width: int, like: Tensor) -> Tensor:
        """Returns the matrix (C, H (N + V)) by which `kv_up` multiplies latents of `width` C, in the dtype of `like`.

        It is computed once per generation.
        """
        # The module's output for the identity: `kv_up.weight` would miss a low-rank adapter around the module.
        if self._up is None:
            self._up = kv_up(torch.eye(width, dtype=like.dtype, device=like.device))
        return self._up


class IndexedCache(LatentCache):
    """Caches the indexer's keys, too: C + P numbers and its width per position."""

    def extend_indexed(
        self, latent: Tensor, rope: Tensor, index: Tensor, positions: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `extend`, with the indexer's keys (B, S, …), of which all so far are returned between the others."""
        (cached, keys), mask = self.append([torch.cat([latent, rope], -1), index], positions, mask)
        return cached, keys, mask


def absorbs(new: int, cached: int, widths: Widths) -> bool:
    """Whether S = `new` queries attend to T = `cached` latents with fewer FLOPs than to their keys and values.

    A single query does; the queries of a prompt do not.
    """
    up = widths.kv_latent * (widths.nope + widths.value)
    # Multiplications for each head and row
    # Twice the whole width: latents are the values as well, and the mixed P of them are dropped
    absorbed = new * up + new * cached * 2 * (widths.kv_latent + widths.rope)
    expanded = cached * up + new * cached * 2 * widths.key
    return absorbed < expanded
