"""Devices by the functions that torch has for each: CUDA and ROCm (both `cuda`), XPU, MPS, and vendors' own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

NEEDED = {"Event", "device_count", "manual_seed", "synchronize"}
"""What a run needs of an accelerator's module; docs/how-to/new-device.md has what it uses where that exists."""


def device_problem(name: str) -> str:
    """Why a run cannot use an accelerator: torch does not know it, or its module lacks something. Empty: it can."""
    try:
        missing = sorted(NEEDED.difference(dir(torch.get_device_module(name))))
    except RuntimeError as error:
        return f"{error}; use auto, cpu, cuda, xpu, mps, or one that an installed package adds to torch"
    return f"its module in torch lacks {', '.join(missing)}" if missing else ""


def query_device(device: torch.device, function: str) -> Any:
    """What a function of the device's module returns for it, as `get_device_name`; None where its module has none."""
    found = getattr(torch.get_device_module(device), function, None)
    return found(device) if found else None


def home_of(tensors: Iterable[Tensor]) -> torch.device | str:
    """The accelerator on which some of these tensors are, or the CPU if all are there."""
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), "cpu")
