"""Several nodes on one machine: what a cluster starts on each of its nodes, with the variables of the node."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch
from attrs import define, field

from forge_core.checkpoint.storage import Local, LocalStorage
from forge_core.checkpoint.tensors import bytes_of, load_tensors, read_index
from forge_core.contracts.errors import ForgeError
from forge_kit.tools.metrics import read_metrics
from forge_testing.tiny import TINY_JOB

POLL_S = 0.1
SLOW_JOB = (
    TINY_JOB.replace("steps = 4", "steps = 40")
    + """
[job]
name = "NAME"
[checkpoint]
interval = 10
[hooks.slow]
type = "./slow.py:Slow"
"""
)
"""A job that is slow enough to be stopped in the middle; it needs `SLOW_HOOK` as `slow.py`."""
SLOW_HOOK = """
import time
from attrs import define
from forge_core import TrainingHook


@define(kw_only=True, slots=False)
class Slow(TrainingHook):
    def on_step_begin(self, context):
        time.sleep(0.05)
"""


@define
class Nodes:
    """Runs one shell script on each of several nodes, and stops them as a preemption does.

    A context manager, which kills the nodes that are left. `forge-run` is this environment's.

    Args:
        script: of each node, as a cluster would run it.
        variables: what the cluster sets, for each node.
        folder: working directory of all nodes, which they share.
    """

    script: str
    variables: Sequence[Mapping[str, str]]
    folder: Path
    processes: list[subprocess.Popen] = field(factory=list, init=False)

    def __enter__(self) -> Nodes:
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        common = {**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1"}
        # Nodes of two tests would otherwise meet at the port of one another
        script = self.script.replace("--address=", f"--port={free_port()} --address=")
        for own in self.variables:
            command = ["bash", "-c", script]
            self.processes.append(
                subprocess.Popen(command, cwd=self.folder, env={**common, **own}, start_new_session=True)
            )
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def wait(self, limit_s: float = 120) -> list[int]:
        """Returns the exit code of each node, once all have ended."""
        return [process.wait(limit_s) for process in self.processes]

    def preempt(self) -> None:
        """Send SIGTERM to the script of each node, and to what it has started in its session."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)

    def wait_for_step(self, run: Path, step: int, limit_s: float = 120) -> None:
        """Wait until the metrics of a run have a step; an AssertionError if a node ends before."""
        deadline = time.monotonic() + limit_s
        while not _has_step(run, step):
            assert time.monotonic() < deadline, f"no step {step} within {limit_s:g} s"
            assert None in [process.poll() for process in self.processes], "ended before"
            time.sleep(POLL_S)


def free_port() -> int:
    """Returns a port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def digest_of(run: Path, step: int) -> str:
    """Returns the SHA-256 of all tensors of a checkpoint, optimizer included, whichever rank wrote them."""
    folder = LocalStorage(run / Local().folder).path(step)
    index = read_index(folder)
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in sorted(index.shapes.items())}
    load_tensors(folder, tensors, index)
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(name.encode() + bytes_of(tensor))
    return digest.hexdigest()


def _has_step(run: Path, step: int) -> bool:
    # Before the first step there is no file
    with suppress(ForgeError):
        return any(line.get("step", 0) >= step for line in read_metrics(run))
    return False
