"""Values narrower than keys, for kernels that need one width for both.

Shapes: B sequences, T positions, K key/value heads, E width of keys, V width of values.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from forge_plugin_transformer.attention_backends import Kernel

NARROW: frozenset[Kernel] = frozenset({"math", "efficient", "gemm"})
"""Kernels that accept values of another width than keys. Not `torch`, which then avoids the flash kernel."""


def narrowed(mixed: Tensor, width: int) -> Tensor:
    """Drop the outputs of padded values: (…, V or more) to (…, V)."""
    return mixed if mixed.shape[-1] == width else mixed[..., :width]


def padded(v: Tensor, k: Tensor, kernel: Kernel) -> Tensor:
    """Pads values (B, T, K, V) with zeros to the width of the keys (B, T, K, E) if the kernel needs it.

    `narrowed` undoes it in the result.

    Raises:
        ValueError: the kernel needs it, and values are wider than keys.
    """
    missing = k.shape[-1] - v.shape[-1]
    if kernel in NARROW or not missing:
        return v
    if missing < 0:
        widths = f"values are {v.shape[-1]} wide, keys {k.shape[-1]}"
        raise ValueError(f"{widths}; this kernel takes values as wide as keys or narrower")
    return F.pad(v, (0, missing))
