"""Capacity: limits on the tokens of a sequence that an expert takes.

Shapes: B sequences, S positions, K choices of a token, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_core.contracts.errors import ForgeError
from forge_plugin_moe.modules.balance import set_means
from forge_plugin_moe.modules.sequences import Sequences, tally

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch


def refuse_documents(batch: Batch) -> None:
    """Refuse isolated documents, among whose tokens an expert's choice or capacity would decide together.

    Checking a job refuses packings that isolate documents; this catches datasets that do so themselves.

    Raises:
        ForgeError: the batch has several documents in a sequence.
    """
    if "document_ids" in batch:
        raise ForgeError(
            "experts choose, or have a capacity, over whole sequences, but the batch has `document_ids`: documents "
            "would change each other; let tokens choose without a capacity, or leave `document_ids` out"
        )


def largest(scores: Tensor, count: int | Tensor, sequences: Sequences, batch: Batch) -> Tensor:
    """(B, S, E), bool: for each sequence and expert, the `count` positions with the largest scores, none of -inf.

    `count` is one number for all, or (B, E). Of equal scores, the first positions of the sequence are taken.
    """
    everywhere = sequences.whole(scores, batch)
    # Every rank sorts the whole sequence, so that all agree; stable, so that ties do not depend on the device
    best = everywhere.argsort(dim=1, descending=True, stable=True)
    among = torch.arange(best.shape[1], device=best.device).unsqueeze(-1)
    within = among < (count.unsqueeze(1) if isinstance(count, Tensor) else count)
    taken = torch.zeros_like(everywhere, dtype=torch.bool).scatter_(1, best, within.expand_as(best))
    return sequences.own(taken & (everywhere > -math.inf), batch)


def within_capacity(
    weights: Tensor,
    chosen: Tensor,
    factor: float,
    experts: int,
    sequences: Sequences,
    batch: Batch,
    sets: Sequence[int] = (),
) -> Tensor:
    """(B, S, K), bool: the choices that experts accept, which are those with the largest weights.

    Args:
        weights: (B, S, K), of the router.
        chosen: (B, S, K), of the router.
        factor: multiple of an even share, which is choices of a sequence / E; the product is rounded up.
        experts: E.
        sequences: the pieces of the sequences on other ranks.
        batch: the micro-batch, with `places` where ranks share sequences.
        sets: sizes of sets of consecutive experts; an even share is then the mean choices per expert of a set.
    """
    capacity: int | Tensor
    if sets:
        loads = sequences.add_up(tally(chosen, experts)).double()
        capacity = (factor * set_means(loads, sets)).ceil().clamp(min=1)
    else:
        length = weights.shape[1] * sequences.pieces
        capacity = max(1, math.ceil(factor * length * weights.shape[2] / experts))
    # The last column takes the choices of no expert, and is cut off afterwards
    wanted = torch.full((*weights.shape[:2], experts + 1), -math.inf, device=weights.device, dtype=weights.dtype)
    wanted.scatter_(2, chosen.where(chosen >= 0, experts), weights.detach())
    taken = largest(wanted[..., :experts], capacity, sequences, batch)
    # `gather` takes no -1: the choice of no expert is read at 0, and masked
    return taken.gather(2, chosen.clamp(min=0)) & (chosen >= 0)
