"""What the tools of tests use that torch keeps to itself; `test_torch_internals.py` names what a torch has changed."""

from __future__ import annotations

import importlib
import traceback
from datetime import timedelta
from types import SimpleNamespace
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


def record_no_stacks() -> None:
    """Keep torch from recording the stack of each `FakeTensorMode` and each `torch.manual_seed`.

    It shows them in errors of mixed modes and of a device's first use. Below pytest, stacks are a hundred calls deep:
    recording them takes a hundredth of the time of all tests.
    """
    without = SimpleNamespace(**vars(traceback) | dict.fromkeys(("extract_stack", "format_stack"), list))
    for name in ("torch._subclasses.fake_tensor", "torch.cuda", "torch.xpu", "torch.mtia"):
        mock.patch.object(importlib.import_module(name), "traceback", without).start()
