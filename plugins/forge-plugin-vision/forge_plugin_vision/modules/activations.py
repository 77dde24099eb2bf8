"""Activations of towers and adapters, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F


def quick_gelu(x: Tensor) -> Tensor:
    """X sigmoid(1.702 x), OpenAI CLIP's approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "silu": F.silu,
    "relu": F.relu,
}
"""`gelu_tanh` is the tanh approximation."""
