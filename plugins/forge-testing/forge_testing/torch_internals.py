"""What the tools of tests use that torch keeps to itself; `test_torch_internals.py` names what a torch has changed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

from torch.distributed import ProcessGroupGloo


def share_device_of_gloo() -> None:
    """Make the process groups that this process creates from here on share one device of gloo.

    A device has a thread that wakes a hundred times per second, and torch creates one per group: with the hundred
    groups of a table of layouts, these threads take an eighth of the time.
    """
    create = ProcessGroupGloo.__init__
    device = ProcessGroupGloo.create_default_device()

    def with_device(
        self: ProcessGroupGloo, store: Any, rank: int, size: int, timeout: timedelta, **settings: Any
    ) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [device], timeout
        for name, value in settings.items():  # `enable_reconfigure` of torch 2.15
            setattr(options, name, value)
        create(self, store, rank, size, options)

    mock.patch.object(ProcessGroupGloo, "__init__", with_device).start()
