"""Everything private to torch that low-bit optimizers use; `tests/test_torch_internals.py` names what has changed."""

from __future__ import annotations

from torch import Tensor


def mark_dynamic(tensor: Tensor, dimension: int) -> None:
    """Let torch.compile make a kernel for any size of a dimension at once; described in no public module."""
    import torch._dynamo

    torch._dynamo.mark_dynamic(tensor, dimension)
