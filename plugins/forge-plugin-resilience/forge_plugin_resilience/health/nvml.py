"""State of a GPU by NVML, the library of its driver, and what in it is a fault."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attrs import frozen

from forge_core.contracts.errors import ForgeError

if TYPE_CHECKING:
    import torch

OF_THE_PROGRAM = {13: "graphics engine exception", 31: "page fault", 43: "stopped processing", 45: "cleaned up"}
"""Xid errors that a program causes, by NVIDIA's table of them; the others are the GPU's, its memory's or its links'."""
THROTTLES = ("HwSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown", "SwThermalSlowdown")
"""Reasons for lower clocks that a healthy machine does not have; a limit of power is none of them."""
XID_EVENT = 8
"""`nvmlEventTypeXidCriticalError`."""


class NoNVML(ForgeError):
    """NVML cannot be used on this machine."""


def load_nvml() -> ModuleType:
    """The module `pynvml`, with the library opened; raises `NoNVML` with what to do."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        raise NoNVML("the package nvidia-ml-py is not installed: pip install 'forge-plugin-resilience[gpu]'") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoNVML(f"this machine has no NVML, the library of NVIDIA's driver ({error})") from None
    return nvml


@frozen(kw_only=True)
class Reading:
    """State of a GPU at one time. None, zero or empty where a GPU does not have a thing."""

    uncorrected: int = 0
    """Uncorrected ECC errors since the driver was loaded."""
    remap_pending: bool = False
    """Whether a faulty row of memory waits for a reset of the GPU to be replaced by a spare one."""
    remap_failed: bool = False
    throttles: tuple[str, ...] = ()
    pcie_width: int | None = None
    pcie_full_width: int | None = None
    pcie_replays: int = 0
    nvlinks_down: int = 0
    nvlink_errors: int = 0
    xids: tuple[int, ...] = ()
    """Errors in the driver's log since the reading before."""


class Device:
    """One GPU, of which `read` returns the state."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._events = self._ask(nvml.nvmlEventSetCreate)
        if self._events is not None:
            self._ask(nvml.nvmlDeviceRegisterEvents, handle, XID_EVENT, self._events)
        # Links that are up at the start: a GPU may have fewer than the maximum, and only one that goes down is a fault
        self._links = [link for link in range(nvml.NVML_NVLINK_MAX_LINKS) if self._link_is_up(link)]

    def read(self) -> Reading:
        """The present state. Takes some milliseconds; on a GPU that has fallen off the bus, it may take for ever."""
        nvml, ask, handle = self._nvml, self._ask, self._handle
        # Rows that were replaced already, the first two numbers, are no faults any more
        _, _, pending, failed = ask(nvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
        reasons = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        counters = range(nvml.NVML_NVLINK_ERROR_COUNT)
        errors = [ask(nvml.nvmlDeviceGetNvLinkErrorCounter, handle, li, c) or 0 for li in self._links for c in counters]
        return Reading(
            uncorrected=ask(nvml.nvmlDeviceGetTotalEccErrors, handle, 1, 0) or 0,  # uncorrected, volatile
            remap_pending=bool(pending),
            remap_failed=bool(failed),
            throttles=tuple(name for name in THROTTLES if reasons & getattr(nvml, f"nvmlClocksThrottleReason{name}")),
            pcie_width=ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            pcie_full_width=ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            pcie_replays=ask(nvml.nvmlDeviceGetPcieReplayCounter, handle) or 0,
            nvlinks_down=sum(not self._link_is_up(link) for link in self._links),
            nvlink_errors=sum(errors),
            xids=tuple(self._xids()),
        )

    def _link_is_up(self, link: int) -> bool:
        return bool(self._ask(self._nvml.nvmlDeviceGetNvLinkState, self._handle, link))

    def _xids(self) -> Iterator[int]:
        while self._events is not None:
            event = self._ask(self._nvml.nvmlEventSetWait, self._events, 0)
            if event is None:  # a timeout: there are no more
                return
            yield int(event.eventData)

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The answer of NVML; None for what this GPU, or a virtual one, does not have."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            if error.value in (self._nvml.NVML_ERROR_NOT_SUPPORTED, self._nvml.NVML_ERROR_TIMEOUT):
                return None
            # A container may not read all counters, and a link number that this GPU lacks is an invalid argument
            if error.value in (self._nvml.NVML_ERROR_NO_PERMISSION, self._nvml.NVML_ERROR_INVALID_ARGUMENT):
                return None
            raise


def device_of(nvml: Any, device: torch.device) -> Device:
    """The GPU that torch calls `device`, whichever number NVML has for it."""
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"  # torch leaves the prefix out
    return Device(nvml, nvml.nvmlDeviceGetHandleByUUID(name.encode()))


def faults(before: Reading | None, now: Reading) -> list[str]:
    """The faults, in words: new since `before`, or since the driver was loaded if that is None."""
    last = before or Reading()
    found = []
    if now.uncorrected > last.uncorrected:
        found.append(f"{now.uncorrected - last.uncorrected} uncorrected ECC errors of its memory")
    if now.remap_failed and not last.remap_failed:
        found.append("a faulty row of its memory has no spare any more: replace the GPU")
    elif now.remap_pending and not last.remap_pending:
        found.append("a faulty row of its memory waits to be replaced: reset the GPU")
    if now.nvlinks_down > last.nvlinks_down:
        found.append(f"{now.nvlinks_down} of its NVLinks are down")
    found += [f"Xid {xid}" for xid in now.xids if xid not in OF_THE_PROGRAM]
    return found


def warnings_of(before: Reading | None, now: Reading) -> list[str]:
    """Reasons why it is slow, or that may be the program's own fault, in words."""
    last = before or Reading()
    found = [f"its clocks are lowered: {name}" for name in now.throttles if name not in last.throttles]
    is_narrow = (now.pcie_width or 0) < (now.pcie_full_width or 0)
    if is_narrow and (before is None or before.pcie_width != now.pcie_width):
        found.append(f"its PCIe link has {now.pcie_width} of {now.pcie_full_width} lanes")
    # Counters began before this run: a first reading has errors of earlier programs, too
    if before is not None and now.pcie_replays > before.pcie_replays:
        found.append(f"{now.pcie_replays - before.pcie_replays} packets were sent again over PCIe")
    if before is not None and now.nvlink_errors > before.nvlink_errors:
        found.append(f"{now.nvlink_errors - before.nvlink_errors} errors of its NVLinks were corrected")
    found += [f"Xid {xid} ({OF_THE_PROGRAM[xid]}), of the program" for xid in now.xids if xid in OF_THE_PROGRAM]
    return found
