"""Proposals of the modules of multi-token prediction, in generation (DeepSeek-V3, arXiv 2412.19437, section 5.4.3).

Shapes: S new positions of one row, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_kit.nn.generation import whole_logits
from forge_plugin_transformer.modules.multi_token import PredictionBlock

if TYPE_CHECKING:
    from forge_kit.nn.modules import Embedding, LinearHead


class ModuleDrafts:
    """A `forge_kit.nn.generation.Drafter`: each module proposes the likeliest token one further ahead.

    Module k reads, at position i, the state of module k - 1 there and the token k positions later. Where that token is
    itself a proposal, the position is forgotten afterwards, and computed again in the next call.
    """

    def __init__(self, blocks: Sequence[PredictionBlock], embedding: Embedding, head: LinearHead, length: int) -> None:
        self._blocks, self._embedding, self._head = blocks, embedding, head
        self._caches: list[Any] = [block.new_cache(1, length) for block in blocks]
        self._read = [0] * len(blocks)
        """Positions of each module that are computed with tokens of the row."""
        self._before: list[Tensor | None] = [None] * len(blocks)
        """States of the previous module at positions after these, as far as they will not change."""

    def __call__(self, hidden: Tensor, ids: Sequence[int]) -> list[int]:
        """See `Drafter`. The states (1, S, D) may be wider than the modules compute in."""
        known, tokens = len(ids), list(ids)
        # Of the model itself, no state changes any more
        state, final = hidden.to(self._embedding.dtype), known - 1
        for number, block in enumerate(self._blocks):
            before, start = self._before[number], self._read[number]
            reads = state if before is None else torch.cat([before, state], 1)
            ahead = torch.tensor([tokens[start + number + 1 : known + number]], device=hidden.device)
            batch = {"positions": torch.arange(start, known - 1, device=hidden.device)[None]}
            batch = block.prepare_decode(batch, self._caches[number])
            state = block(reads, self._embedding(ahead), batch, self._caches[number])
            tokens.append(int(whole_logits(self._head, state[:, -1:]).argmax()))
            # The last positions but `number` of them have read tokens of the row only
            read = max(known - 1 - number, 0)
            self._caches[number].forget(known - 1 - read)
            self._read[number], self._before[number] = read, reads[:, read - start : final - start]
            final = read
        return tokens[known:]
