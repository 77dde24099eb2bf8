"""What modules of devices have in common, but for their arguments."""

from __future__ import annotations

from inspect import signature

import torch


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all that it was asked for; on a CPU nothing is outstanding."""
    synchronize = torch.get_device_module(device).synchronize
    # torch.mps has one device, and its function takes none
    synchronize(*([device] if signature(synchronize).parameters else []))
