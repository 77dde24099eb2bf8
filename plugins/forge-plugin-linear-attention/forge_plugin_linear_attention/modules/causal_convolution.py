"""The causal convolution of each feature, which stops at documents.

Shapes: B sequences, S positions, … one or more dimensions of features, W positions that the convolution sees.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


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
            shifted = F.pad(x, (*[0] * (2 * features), back, 0))[:, :length]
        else:
            shifted = torch.cat([before[:, width - 1 - back :], x], 1)[:, :length]
        if documents is not None:
            same = documents == F.pad(documents, (back, 0), value=-1)[:, :length]
            shifted = shifted * same[(..., *[None] * features)]
        y = y + shifted * weight[..., width - 1 - back]
    return y
