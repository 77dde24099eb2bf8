"""Devices by the functions that torch has for each: CUDA and ROCm (both `cuda`), XPU, MPS, and vendors' own."""

from __future__ import annotations

from typing import Any

import torch

from forge_core.contracts.errors import JobError

NEEDED = ("Event", "device_count", "manual_seed", "synchronize")
"""What a run needs of the module of an accelerator; `docs/how-to/new-device.md` has what it uses where that exists."""


def device_module(name: str) -> Any:
    """The module of a type of device, as `torch.xpu` is; `torch.cpu` has streams and events that do nothing.

    Raises:
        JobError: torch does not know the device, or its module lacks what a run needs.
    """
    try:
        module = torch.get_device_module(name)
        missing = set(NEEDED) - set(dir(module))
        if name != "cpu" and missing:
            raise RuntimeError(f"its module in torch lacks {', '.join(sorted(missing))}")
    except RuntimeError as error:
        known = "auto, cpu, cuda, xpu, mps, or one that an installed package adds to torch"
        raise JobError.at("train.device", f'is "{name}": {error}; use {known}') from None
    return module


def query_device(device: torch.device, function: str) -> Any:
    """What a function of the device's module returns for it, as `get_device_name`; None where its module has none."""
    found = getattr(torch.get_device_module(device), function, None)
    return found(device) if found else None
