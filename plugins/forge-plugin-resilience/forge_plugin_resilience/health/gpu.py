"""The hook `gpu`."""

from __future__ import annotations

import socket
import threading
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import define, field
from attrs.validators import gt

from forge_core import Problem, TrainingHook
from forge_core.contracts.components import WhenResumed
from forge_core.contracts.errors import ForgeError
from forge_plugin_resilience.health.nvml import Device, NoNVML, Reading, device_of, faults, load_nvml, warnings_of

if TYPE_CHECKING:
    from forge_core import Job
    from forge_core.contracts.contexts import StepContext, TrainContext
    from forge_core.contracts.layout import Layout


@define(kw_only=True, slots=False)
class GPU(TrainingHook):
    """Watches the GPU of each rank by NVML, in a thread that the steps do not wait for.

    Faults are uncorrected ECC errors, rows of memory that wait to be replaced or have no spare, NVLinks that go down,
    and Xid errors other than a program's own. At the start, a machine with faults is refused. The hook warns of lowered
    clocks, a PCIe link with fewer lanes, packets that are sent again, and corrected errors of NVLinks.
    """

    resumes_as: ClassVar[WhenResumed | None] = "safe"

    interval_s: float = field(default=60.0, validator=gt(0))
    """Seconds between readings."""
    on_fault: Literal["stop", "warn"] = "stop"
    """On a fault: refuse to start, or save and stop with exit code 75; or warn and continue."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Reports a job on the CPU, and a machine without NVML, when the job is checked."""
        if job.train.device == "cpu":
            yield Problem("", 'train.device is "cpu", so there is no GPU to watch; leave this hook out')
            return
        try:
            load_nvml()
        except NoNVML as error:
            hint = "check the job where its GPUs are, or leave this hook out in a job layer of this machine's own"
            yield Problem("", f"{error}; {hint}")

    def on_train_begin(self, context: TrainContext) -> None:
        """Read the GPU; raise a `ForgeError` or warn if it has faults already, and start the thread."""
        from forge_core.parallel.mesh import global_rank

        device = next(context.model.parameters()).device
        self._name = f"the GPU of rank {global_rank()} on {socket.gethostname()}"
        self._device = self._find(device)
        self._found: list[str] = []
        self._over = threading.Event()
        reading = self._device.read()
        for text in warnings_of(None, reading):
            warnings.warn(f"{self._name}: {text}", stacklevel=2)
        if found := faults(None, reading):
            text = f"{self._name}: {', '.join(found)}"
            if self.on_fault == "stop":
                raise ForgeError(f'{text}; leave the machine out, or set hooks.gpu.on_fault = "warn"')
            warnings.warn(text, stacklevel=2)
        self._thread = threading.Thread(target=self._watch, args=[reading], name="forge-gpu-health", daemon=True)
        self._thread.start()

    def _find(self, device: object) -> Device:
        import torch

        if not isinstance(device, torch.device) or device.type != "cuda":
            raise ForgeError(f"{self._name}: trains on {device}, where NVML sees nothing; leave out hooks.gpu")
        return device_of(load_nvml(), device)

    def on_step_end(self, context: StepContext) -> None:
        """Request a stop for faults that the thread has found, at the point of a step where ranks agree on it."""
        if self._found and self.on_fault == "stop":
            context.request_stop(f"{self._name}: {', '.join(self._found)}")

    def on_train_end(self, context: TrainContext) -> None:
        """Let the thread end. Without a join: a query that never returns would keep the process."""
        self._over.set()

    def on_exception(self, context: TrainContext, error: BaseException) -> None:
        self._over.set()

    def _watch(self, last: Reading) -> None:
        # In a thread: a query to a GPU that has fallen off the bus may never return
        while not self._over.wait(self.interval_s):
            try:
                reading = self._device.read()
            except Exception as error:  # NVML reports "GPU is lost", which is a fault as well
                self._note([f"NVML cannot read it: {error}"])
                return
            for text in warnings_of(last, reading):
                warnings.warn(f"{self._name}: {text}", stacklevel=2)
            # Compared with the reading before, so that a lasting fault is noted once
            self._note(faults(last, reading))
            last = reading

    def _note(self, found: list[str]) -> None:
        for text in found:
            warnings.warn(f"{self._name}: {text}", stacklevel=2)
        self._found = self._found + found  # a new list, as the main thread may be reading the old one
