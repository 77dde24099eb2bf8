"""The recurrences by the Triton kernels of the package flash-linear-attention.

Shapes: B sequences, S positions, H heads, K width of keys, V width of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from forge_kit.nn.causal_convolution import numbered

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch

Rule = Literal["gated_delta_rule", "kda", "simple_gla"]
"""A recurrence, by the name that the package has for it: of Gated DeltaNet, of Kimi Delta Attention, of Mamba-2."""


def read_by_fla(
    rule: Rule, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, batch: Batch, beta: Tensor | None = None
) -> Tensor:
    """Returns what each position reads, (B, S, H, V), in the dtype of v.

    Args:
        rule: the recurrence.
        q: (B, S, H, K), with any factor on the output.
        k: (B, S, H, K).
        v: (B, S, H, V).
        log_decay: (B, S, H), of `kda` (B, S, H, K).
        batch: `document_ids` (B, S), if documents are apart.
        beta: (B, S, H); None for `simple_gla`, which has none.
    """
    documents = batch.get("document_ids")
    q, k = q.to(v.dtype), k.to(v.dtype)
    # The decay is summed over chunks, and stays as wide as it is
    arguments = {"q": q, "k": k, "v": v, "g": log_decay} | ({} if beta is None else {"beta": beta})
    bounds = None
    if documents is not None:  # all rows as one, in which documents are sequences
        bounds = _bounds(documents)
        arguments = {name: x.flatten(0, 1).unsqueeze(0) for name, x in arguments.items()}
    # Queries have their factor already; by default, kernels would multiply by K^-0.5 once more
    read, _ = _kernel(rule)(**arguments, scale=1.0, cu_seqlens=bounds)
    return read.view(v.shape)


def _kernel(rule: Rule) -> Callable[..., tuple[Tensor, Any]]:
    # Late, as the package compiles when it is imported, and only on a GPU
    if rule == "gated_delta_rule":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule
    if rule == "kda":
        from fla.ops.kda import chunk_kda

        return chunk_kda
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla


def _bounds(document_ids: Tensor) -> Tensor:
    """Returns the starts of documents in the concatenation of all rows, and the end: int64, one dimension."""
    numbers = numbered(document_ids)
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    begins = starts.flatten().nonzero().flatten()  # the host waits for their number, as the kernels' grid depends on it
    return torch.cat([begins, begins.new_tensor([document_ids.numel()])])
