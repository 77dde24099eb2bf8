"""The part of attention that has no parameters: queries, keys and values in, mixed values out.

Shapes: B sequences, S query positions, T key positions, H query heads, K key/value heads, E width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from forge_plugin_transformer.attention_backends import Choice, Kernel
from forge_plugin_transformer.modules.gemm_attention import gemm_attention

TORCH_KERNELS: Mapping[Kernel, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
WITHOUT_GROUPS: frozenset[Kernel] = frozenset({"efficient", "cudnn"})
"""Kernels that want a key/value head for every query head."""


class AttentionCore(nn.Module):
    """Attention over a whole sequence, by the chosen kernel: q (B, S, H, E), k and v (B, S, K, E) -> (B, S, H, E).

    A module of its own, so that a stage which splits the sequence can put another in its place.
    """

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.choice = choice

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask`: (B, 1, S, S), true where a position may attend, nowhere above the diagonal; None: causal."""
        if self.choice.kernel == "gemm":
            return gemm_attention(q, k, v, mask)
        return torch_attention(q, k, v, mask, self.choice.kernel)

    def extra_repr(self) -> str:
        return self.choice.kernel


def torch_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: Kernel = "torch") -> Tensor:
    """`scaled_dot_product_attention`, by one of its kernels or (`torch`) the one it prefers.

    q (B, S, H, E), k and v (B, T, K, E), mask (B, 1, S, T) or None for causal with S = T -> (B, S, H, E).

    Raises:
        ValueError: the flash kernel is set, and it cannot take a mask on this device.
    """
    on_cuda = q.device.type == "cuda"
    if kernel == "flash" and mask is not None and on_cuda:
        raise ValueError("the flash kernel takes no mask (document_ids) on cuda; set attention.backend to another")
    if kernel in WITHOUT_GROUPS or (on_cuda and mask is not None):
        k, v = (tensor.repeat_interleave(q.shape[2] // tensor.shape[2], 2) for tensor in (k, v))
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    with _only(kernel):
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)
    return out.transpose(1, 2)


def _only(kernel: Kernel) -> AbstractContextManager[None]:
    return sdpa_kernel(TORCH_KERNELS[kernel]) if kernel in TORCH_KERNELS else nullcontext()


def document_mask(document_ids: Tensor) -> Tensor:
    """Which position may attend to which: those of its own document up to itself. (B, S) -> (B, 1, S, S) bool."""
    length = document_ids.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril_()
    return ((document_ids[:, :, None] == document_ids[:, None, :]) & earlier)[:, None]
