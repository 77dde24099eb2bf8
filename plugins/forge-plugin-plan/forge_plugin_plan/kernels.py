"""Attention as GPUs compute it, FLOPs that torch does not count, and memory that kernels take for themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from forge_kit.torch_internals import flash_on_cpu, flash_on_cpu_backward, grouped_mm


class FusedAttention(TorchFunctionMode):
    """Within this context, `scaled_dot_product_attention` runs as a fused kernel.

    It saves queries, keys, values, the result and a normaliser for each position, as all fused kernels do: flash,
    cuDNN's, the memory-efficient one. If a job selects plain matrix products (`math`), these run instead.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention and _fused_allowed():
            return _attend(*args, **kwargs)
        return func(*args, **kwargs)


def _fused_allowed() -> bool:
    allowed = torch.backends.cuda
    return allowed.flash_sdp_enabled() or allowed.mem_efficient_sdp_enabled() or allowed.cudnn_sdp_enabled()


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel's forward; its backward is torch's."""
    del dropout_p, enable_gqa  # dropout takes no memory in such a kernel, and grouped heads are known by the shapes
    # The operator takes masks that are added; `scaled_dot_product_attention` converts boolean ones, too
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.to(q.dtype)
    return flash_on_cpu(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _products(q: Any, k: Any, causal: bool) -> float:
    """Returns the FLOPs of one product over all pairs of positions computed: q (B, H, S, E), k (B, K, T, E)."""
    batch, heads, queries, width = q
    return 2 * batch * heads * queries * k[2] * width / (2 if causal else 1)


def _forward_flops(q: Any, k: Any, _v: Any, _dropout: float = 0.0, causal: bool = False, *_: Any, **__: Any) -> float:
    # Queries by keys, and weights by values
    return 2 * _products(q, k, causal)


def _backward_flops(
    _grad: Any, q: Any, k: Any, _v: Any, _out: Any, _normaliser: Any, _dropout: float, causal: bool, *_: Any, **__: Any
) -> float:
    # The scores again, and two products for each of the two in the forward pass
    return 5 * _products(q, k, causal)


def _grouped_flops(a: Any, b: Any, *_: Any, **__: Any) -> float:
    # Groups are of rows of `a` (M, in), with a matrix each; of columns of both (gradients of matrices); or, if both are
    # stacks, one product each.
    stacks = a[0] if len(a) == 3 == len(b) else 1
    return 2 * stacks * a[-2] * a[-1] * b[-1]


FORMULAS: Mapping[Any, Callable[..., float]] = {
    flash_on_cpu: _forward_flops,
    flash_on_cpu_backward: _backward_flops,
    grouped_mm: _grouped_flops,
}
"""FLOPs of the kernel above, half of them if causal, and of grouped products, from the shapes of arguments. torch
before 2.15 lacks these formulas; since then, its own for attention count all pairs of positions."""


def _size_of_input(x: Tensor, *_: Any, **__: Any) -> int:
    return x.numel() * x.element_size()


TEMPORARIES: Mapping[Any, Callable[..., int]] = {
    # Subtracts the largest value of each row, in a new tensor, before it exponentiates
    torch.ops.aten.logsumexp: _size_of_input,
}
"""Bytes that kernels allocate beside their results and free before they return, as large as activations."""
