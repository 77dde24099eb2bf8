"""Mistakes with streams in the code that ships: a line is taken out, and a short run must end where it was.

Each waits for something, or keeps memory, that all else does without on a device that happens to be fast enough.
"""

from __future__ import annotations

import importlib
import inspect
import os
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from operator import attrgetter
from typing import Any
from unittest.mock import patch

from attrs import frozen

from forge_core import Trainer, load_job
from forge_testing.pretend import PretendTensor

PATIENCE_S = 10.0
JOB = """
[train]
steps = 3
global_batch_size = 4
micro_batch_size = 2
seq_len = 16
device = "pretend"
dry_run = "never"
[model]
type = "transformer"
dim = 16
layers = 2
attention = { heads = 2 }
vocab_size = 32
[[data.sources]]
type = "forge_testing:Numbers"
[optimizer]
type = "adamw"
"""
SAVED = """
[checkpoint]
interval = 1
async_save = true
"""
STORED = """
[parallel.taps]
interval = 1
[parallel.taps.sinks.store]
on_error = "fail"
"""
MEASURED = """
[parallel.taps]
interval = 1
[parallel.taps.sinks.statistics]
"""
OFFLOADED = """
[parallel.activation_offload]
min_mb = 0
"""


@frozen
class Plant:
    """A mistake: in a function of a module, a text stands in the place of another one."""

    module: str
    function: str
    right: str
    at: str
    """A part of the line that the run must name."""
    wrong: str = "pass"
    stages: str = ""
    """Further tables of the job."""

    @contextmanager
    def made(self) -> Iterator[None]:
        """Within this context, the function is wrong; its lines have the numbers that they had."""
        module = importlib.import_module(self.module)
        owner, _, name = self.function.rpartition(".")
        holder: Any = attrgetter(owner)(module) if owner else module
        function: Any = inspect.unwrap(getattr(holder, name))
        lines, first = inspect.getsourcelines(function)
        source = textwrap.dedent("".join(lines))
        assert source.count(self.right) == 1, f"{self.function} has no {self.right!r} any more"
        code = compile("\n" * (first - 1) + source.replace(self.right, self.wrong), inspect.getfile(function), "exec")
        made: dict[str, Callable[..., Any]] = {}
        exec(code, function.__globals__, made)
        with patch.object(holder, name, made[name]):
            yield


RIGHT = {"saved and tapped": SAVED + STORED + "[parallel.taps.sinks.statistics]\n", "offloaded": OFFLOADED}
"""Stages of runs without a mistake."""
OFFLOAD = "forge_plugin_compile.offload.saved_tensors"
PLANTS = {
    "metrics are read before their event": Plant(
        "forge_core.engine.reporting", "_Pending.line", "self.arrived.synchronize()", "self.values.tolist()"
    ),
    "a snapshot is written before its event": Plant(
        "forge_core.checkpoint.tensors",
        "Staging.wait",
        "self._arrived.synchronize()",
        "tensor.detach().cpu()",
        stages=SAVED,
    ),
    "a batch is overwritten while it is sent": Plant(
        "forge_core.data.loader",
        "TrainLoader.next_step",
        "t.to(device, non_blocking=True)",
        "t.to(device, non_blocking=True)",
        "(t.to(device, non_blocking=True), t.zero_())[0]",
    ),
    "a store of taps is written before its event": Plant(
        "forge_plugin_taps.store_writer",
        "StoreWriter.settle",
        "pending.copied.synchronize()",
        "values.contiguous()",
        stages=STORED,
    ),
    "statistics of taps are read before their event": Plant(
        "forge_plugin_taps.statistics_sink",
        "StatisticsSink.settle",
        "self._copied.synchronize()",
        "figures.tolist()",
        stages=MEASURED,
    ),
    "an activation is sent to the host before it is computed": Plant(
        OFFLOAD,
        "Mover.aside",
        "self._stream.wait_stream(module.current_stream(self._device))",
        "host.copy_(tensor",
        stages=OFFLOADED,
    ),
    "an activation is freed while it is sent": Plant(
        OFFLOAD, "Mover.to_host", "tensor.record_stream(self._stream)", "host.copy_(tensor", stages=OFFLOADED
    ),
}
"""By what goes wrong."""


def found(folder: str) -> dict[str, str]:
    """On the device: for each mistake what ended its run, and for right runs with all of this nothing."""
    os.chdir(folder)
    from forge_plugin_compile.offload import saved_tensors

    with patch.object(saved_tensors, "PLAIN", (*saved_tensors.PLAIN, PretendTensor)):
        said = {name: _run(f"right-{number}", JOB + stages) for number, (name, stages) in enumerate(RIGHT.items())}
        for number, (name, plant) in enumerate(PLANTS.items()):
            with plant.made():
                said[name] = _run(f"wrong-{number}", JOB + plant.stages)
    # Threads that runs have left inside of torch would abort the process at its end
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(PATIENCE_S)
    return said


def _run(name: str, job: str) -> str:
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            Trainer(load_job(job, overrides={"job.name": name}), echo=lambda text: None).run()
    except Exception:
        return traceback.format_exc()
    return ""
