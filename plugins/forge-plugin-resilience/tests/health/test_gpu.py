"""The hook `gpu` with an NVML of our own in place of the driver's."""

from __future__ import annotations

import sys
import time
import types
from unittest.mock import Mock

import pytest
import torch

from forge_core.contracts.errors import ForgeError
from forge_plugin_resilience.health import GPU
from forge_plugin_resilience.health.nvml import Device, Reading, faults, warnings_of
from forge_testing import TINY_JOB
from forge_testing.refusals import lacks, naming, refuses

JOB = f'[job]\nname = "tiny"\n{TINY_JOB}'


class FakeError(Exception):
    def __init__(self, value):
        super().__init__(f"error {value}")
        self.value = value


class FakeNVML(types.ModuleType):
    """Answers as the driver's library does, by the names and numbers of nvidia-ml-py."""

    NVMLError = FakeError
    NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION, NVML_ERROR_TIMEOUT = 2, 3, 4, 10
    NVML_NVLINK_MAX_LINKS, NVML_NVLINK_ERROR_COUNT = 4, 5
    nvmlClocksThrottleReasonHwSlowdown, nvmlClocksThrottleReasonSwThermalSlowdown = 8, 32
    nvmlClocksThrottleReasonHwThermalSlowdown, nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 64, 128

    def __init__(self):
        super().__init__("pynvml")
        self.ecc, self.rows, self.reasons, self.width, self.replays = 0, (0, 0, 0, 0), 4, 16, 0
        self.links, self.link_errors, self.xids, self.lost = [1, 1], 0, [], False

    def nvmlInit(self):
        pass

    def nvmlEventSetCreate(self):
        return "events"

    def nvmlDeviceRegisterEvents(self, handle, kinds, events):
        assert (kinds, events) == (8, "events")

    def nvmlEventSetWait(self, events, milliseconds):
        if not self.xids:
            raise FakeError(self.NVML_ERROR_TIMEOUT)
        return types.SimpleNamespace(eventData=self.xids.pop(0))

    def nvmlDeviceGetTotalEccErrors(self, handle, kind, counter):
        assert (kind, counter) == (1, 0)
        if self.lost:
            raise FakeError(15)
        if self.ecc is None:
            raise FakeError(self.NVML_ERROR_NOT_SUPPORTED)
        return self.ecc

    def nvmlDeviceGetRemappedRows(self, handle):
        return self.rows

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self.reasons

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle):
        return self.width

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle):
        return 16

    def nvmlDeviceGetPcieReplayCounter(self, handle):
        return self.replays

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if link >= len(self.links):
            raise FakeError(self.NVML_ERROR_INVALID_ARGUMENT)
        return self.links[link]

    def nvmlDeviceGetNvLinkErrorCounter(self, handle, link, counter):
        return self.link_errors if (link, counter) == (0, 2) else 0


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNVML()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(GPU, "_find", lambda self, device: Device(fake, "handle"))
    return fake


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"ecc": 2}, ["2 uncorrected", "ECC"]),
        ({"rows": (0, 1, 1, 0)}, ["row", "reset the GPU"]),
        ({"rows": (0, 1, 1, 1)}, ["row", "replace the GPU"]),
        ({"links": [1, 0]}, [1, "NVLinks"]),
        ({"xids": [79]}, ["Xid 79"]),
    ],
)
def test_faults_are_what_is_new_and_broken(nvml, change, facts):
    device = Device(nvml, "handle")
    before = device.read()
    vars(nvml).update(change)
    now = device.read()
    assert faults(before, before) == []
    [fault] = faults(before, now)
    assert not lacks(fault, *facts)
    assert faults(now, device.read()) == [], "once"


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"reasons": 4 | 64}, ["clocks", "HwThermalSlowdown"]),
        ({"width": 8}, ["PCIe", "8 of 16"]),
        ({"replays": 3}, ["PCIe", 3]),
        ({"link_errors": 7}, ["NVLinks", 7]),
        ({"xids": [31]}, ["Xid 31", "page fault"]),
    ],
)
def test_what_is_slow_or_the_programs_own_is_a_warning_and_no_fault(nvml, change, facts):
    device = Device(nvml, "handle")
    before = device.read()
    vars(nvml).update(change)
    now = device.read()
    [warning] = warnings_of(before, now)
    assert not lacks(warning, *facts)
    assert faults(before, now) == []


def test_a_gpu_without_ecc_has_no_errors_of_it(nvml):
    nvml.ecc = None
    assert Device(nvml, "handle").read() == Reading(pcie_width=16, pcie_full_width=16)


def run(tmp_path, step, **keys):
    """A run of some steps, before one of which `step` is called."""
    from forge_core import Trainer, TrainingHook, load_job

    class Change(TrainingHook):
        def on_step_begin(self, context):
            if context.step == 3:
                step()
                time.sleep(0.5)

    text = JOB.replace("steps = 4", "steps = 8") + "[hooks.gpu]\ninterval_s = 0.05\n"
    text += "".join(f"{key} = {value}\n" for key, value in keys.items())
    return Trainer(load_job(text, overrides=[f"job.output={tmp_path}"]), hooks=[Change()], echo=lambda text: None).run()


def test_a_fault_during_a_run_saves_and_stops(nvml, tmp_path):
    with pytest.warns(UserWarning, match=naming("rank 0", "Xid 79")):
        summary = run(tmp_path, lambda: nvml.xids.append(79))
    assert summary.step == 3
    assert summary.exit_code == 75
    assert "Xid 79" in summary.stopped


def test_a_gpu_that_is_lost_is_a_fault(nvml, tmp_path):
    with pytest.warns(UserWarning, match=naming("NVML", "error 15")):
        assert run(tmp_path, lambda: setattr(nvml, "lost", True)).step == 3


def test_a_fault_may_be_warned_of_only(nvml, tmp_path):
    with pytest.warns(UserWarning, match="Xid 79"):
        assert run(tmp_path, lambda: nvml.xids.append(79), on_fault='"warn"').step == 8


def test_a_gpu_with_errors_refuses_to_start(nvml, tmp_path):
    nvml.ecc = 5
    with pytest.raises(ForgeError, match=naming("5 uncorrected", "hooks.gpu.on_fault")):
        run(tmp_path, lambda: None)


def test_the_hook_is_refused_without_nvml_with_what_to_do(monkeypatch):
    from forge_core import load_job

    monkeypatch.setitem(sys.modules, "pynvml", None)
    with refuses("hooks.gpu", "pip install 'forge-plugin-resilience[gpu]'"):
        load_job(JOB + "[hooks.gpu]\n")
    monkeypatch.setitem(sys.modules, "pynvml", without_driver := FakeNVML())
    monkeypatch.setattr(without_driver, "nvmlInit", Mock(side_effect=FakeError(9)))
    with refuses("hooks.gpu", "driver", "error 9"):
        load_job(JOB + "[hooks.gpu]\n")
    with refuses("hooks.gpu", 'train.device is "cpu"'):
        load_job(JOB.replace("[train]", '[train]\ndevice = "cpu"') + "[hooks.gpu]\n")


def test_a_run_that_trains_on_the_cpu_after_all_is_refused():
    """On a machine that has an NVML and a torch without CUDA."""
    context = types.SimpleNamespace(model=torch.nn.Linear(1, 1))
    with pytest.raises(ForgeError, match=naming("rank 0", "cpu", "hooks.gpu")):
        GPU().on_train_begin(context)
