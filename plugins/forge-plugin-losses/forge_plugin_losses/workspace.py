"""Memory that is kept from call to call."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from forge_core.vocab_parallel import accumulation_dtype


class Workspace:
    """Memory for what does not outlive a call.

    On the CPU it is kept from call to call: the system takes longer to supply fresh pages than the loss to fill them.
    The allocators of other devices do that by themselves.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor, good until `name` is asked for again."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        size = math.prod(shape)
        kept = self._kept.get((name, dtype))
        if kept is None or kept.numel() < size:
            with torch.inference_mode(False):
                kept = self._kept[name, dtype] = torch.empty(size, dtype=dtype)
        return kept[:size].view(shape)

    def widened(self, name: str, values: Tensor) -> Tensor:
        """`values` in the dtype in which losses are computed: themselves, or a copy that is good until `name` is asked
        for again."""
        dtype = accumulation_dtype(values.dtype)
        if dtype == values.dtype:
            return values
        return self.empty(name, values.shape, dtype, values.device).copy_(values)
