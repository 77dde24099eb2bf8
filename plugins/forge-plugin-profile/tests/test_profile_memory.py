"""Memory snapshots, with a stand-in for the GPU's recorder."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attrs import define, evolve

from forge_core import TrainingHook
from forge_core.contracts.errors import ForgeError
from forge_plugin_profile import Profile, profile
from forge_plugin_profile.memory import peak_gb
from forge_testing.refusals import naming

CUDA = torch.device("cuda", 0)


@pytest.fixture
def recorder(monkeypatch):
    """Calls of torch's recorder, in order; and a run whose hook believes in a GPU, but records the CPU."""
    calls = []
    signature = inspect.signature(torch.cuda.memory._record_memory_history_impl)  # of torch's own
    memory = SimpleNamespace(
        _record_memory_history=lambda **how: (signature.bind(**how), calls.append(how)),
        _dump_snapshot=lambda path: (calls.append(Path(path).name), Path(path).write_bytes(b"history"))[0],
    )
    monkeypatch.setattr(torch.cuda, "memory", memory)
    monkeypatch.setattr(profile, "device_type", lambda context: "cuda")
    return calls


@define(kw_only=True, slots=False)
class OutOfMemory(TrainingHook):
    """Runs out of memory at the beginning of a step."""

    step: int

    def on_step_begin(self, context):
        if context.step == self.step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def test_a_history_begins_with_the_window_and_is_written_with_the_trace(recorder, train, make_job, tmp_path):
    train(make_job(steps=4, hooks={"profile": Profile(start=3, steps=1, snapshot=True, snapshot_entries=50)}))
    assert recorder == [{"max_entries": 50}, "rank-0.memory.pickle", {"enabled": None}]
    assert (tmp_path / "run" / "profile" / "step-3" / "rank-0.memory.pickle").is_file()


def test_memory_that_runs_out_after_the_window_leaves_a_snapshot(recorder, train, make_job, tmp_path):
    job = make_job(steps=6, hooks={"profile": Profile(start=2, steps=1, snapshot=True)})
    with pytest.raises(ForgeError, match="memory ran out"):
        train(job, OutOfMemory(step=5))
    assert recorder[-2:] == ["rank-0.memory.pickle", {"enabled": None}]
    assert (tmp_path / "run" / "profile" / "out-of-memory" / "rank-0.memory.pickle").is_file()


def test_another_error_leaves_none(recorder, train, make_job, tmp_path):
    @define(kw_only=True, slots=False)
    class Fails(OutOfMemory):
        def on_step_begin(self, context):
            if context.step == self.step:
                raise ValueError("something else")

    job = make_job(steps=6, hooks={"profile": Profile(start=2, steps=3, snapshot=True)})
    with pytest.raises(ValueError, match="something else"):
        train(job, Fails(step=3))
    assert recorder == [{"max_entries": 100_000}, {"enabled": None}]
    assert not (tmp_path / "run" / "profile" / "out-of-memory").exists()


def test_a_cpu_is_said_to_have_none(train, make_job):
    job = make_job(steps=2, hooks={"profile": Profile(start=1, steps=1, snapshot=True)})
    with pytest.warns(UserWarning, match=naming("GPUs", "CPU")):
        train(evolve(job, train=evolve(job.train, device="auto")))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux has this file")
def test_the_peak_of_a_process_on_a_cpu_is_that_of_its_resident_memory():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    # About: the kernel updates its two counters at different times
    assert peak_gb(torch.device("cpu")) == pytest.approx(1024 * int(line.split()[1]) / 1e9, rel=0.5)
