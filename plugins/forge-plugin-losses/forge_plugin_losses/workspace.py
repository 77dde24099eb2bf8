"""Memory that a loss reuses from call to call."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from forge_core.vocab_parallel import accumulation_dtype


class Workspace:
    """Memory for tensors that do not outlive a call.

    On the CPU it is reused from call to call: the system takes longer to supply fresh pages than the loss to fill them.
    Allocators of other devices cache by themselves.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns an uninitialised tensor, valid until the next call with the same `name`."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            # An evaluation may be the first caller, and training refuses tensors made in inference mode.
            with torch.inference_mode(False):
                buffer = self._buffers[name, dtype] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(shape)

    def widened(self, name: str, values: Tensor) -> Tensor:
        """Returns `values` in the dtype that losses are computed in: unchanged, or a copy as from `empty`."""
        dtype = accumulation_dtype(values.dtype)
        if dtype == values.dtype:
            return values
        return self.empty(name, values.shape, dtype, values.device).copy_(values)
