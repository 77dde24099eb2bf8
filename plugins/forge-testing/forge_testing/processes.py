"""Run a function on several ranks: real processes with gloo, forked after one import of torch."""

from __future__ import annotations

import copy
import faulthandler
import gc
import importlib
import io
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from queue import Empty
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from forge_testing.torch_internals import share_device_of_gloo

IMPORTED = (
    "forge_core.engine.trainer",
    "forge_core.losses",
    "forge_core.metrics.console",
    "forge_core.metrics.jsonl",
    "forge_core.schedules",
    "packaging.requirements",
    "rich.progress",
    "torch._dynamo",
    "torch._dynamo.backends.debugging",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.utils.flop_counter",
)
"""Modules that most runs import, which takes a second or two: imported here once, and not in each rank of each test."""

_imported_by_ranks: set[str] = set()
"""Modules of plugins that a rank has imported, which are imported here before the next ranks start."""

HANG_S = 600.0
"""Seconds after which processes are considered deadlocked. No test takes as long, even on a busy machine, so reaching
it is an error of the code."""


def prepare_to_fork() -> None:
    """Make forked processes able to run a backward pass, whatever this process runs before it forks them.

    autograd starts its threads in the first backward pass of a process, and refuses to run in forks of a process with
    threads. It starts them for devices only; but a CUDA build of torch without a GPU has a device as soon as a
    `FakeTensorMode` was entered, which compilation and plans do. So the first backward pass has to be before that.
    """
    # With a GPU it would start the threads itself.
    if torch.cuda.device_count() == 0:
        torch.zeros(1, requires_grad=True).sum().backward()


def run_on_ranks(ranks: int, function: Callable[[int], Any], timeout: float = HANG_S) -> list[Any]:
    """Run `function(rank)` on every rank, each a forked process of one gloo group.

    Args:
        ranks: World size.
        function: Called in each process. Its result is pickled: tensors are sent as bytes, since a queue would request
            their shared memory after the process has ended.
        timeout: Seconds until all ranks are killed.

    Returns:
        The results, in the order of ranks.

    Raises:
        AssertionError: A rank failed (its traceback is the message), or the timeout was reached.
    """
    for name in IMPORTED:
        importlib.import_module(name)
    while _imported_by_ranks:
        with suppress(ImportError):  # of a package that a test has removed since
            importlib.import_module(_imported_by_ranks.pop())
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    # pytest's `faulthandler_timeout` is a thread, which a fork does not copy, and ranks would wait for its end
    faulthandler.cancel_dump_traceback_later()
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory() as folder:
        args = [(rank, ranks, function, Path(folder) / "meet", timeout, results) for rank in range(ranks)]
        processes = [context.Process(target=_rank, args=arguments) for arguments in args]
        gc.disable()  # until each rank has frozen what it inherits
        for process in processes:
            process.start()
        gc.enable()
        try:
            return _collect(processes, results, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _rank(rank: int, ranks: int, function: Callable[[int], Any], meet: Path, timeout: float, results: Any) -> None:
    # A collection here would touch, and so copy, all objects imported before the fork. And it would hang where garbage
    # holds a process group: freeing one waits for its threads, which a fork does not copy.
    gc.freeze()
    gc.enable()
    faulthandler.dump_traceback_later(timeout - 2, exit=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # unused: the group is created below
    torch.set_num_threads(1)
    try:
        share_device_of_gloo()
        dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks)
        _reuse_meshes()
        buffer = io.BytesIO()
        before = set(sys.modules)
        value = function(rank)
        imported = [name for name in set(sys.modules) - before if name.startswith("forge_plugin_")]
        torch.save((value, imported), buffer)
        results.put((rank, True, buffer.getvalue()))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    results.close()
    results.join_thread()
    # The parent kills all ranks once it has all results or an error. None leaves before that, while others may need it.
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _reuse_meshes() -> None:
    """Make runs of this process that arrange its ranks alike share the process groups of their mesh.

    Each group has two threads, and the caches of DTensor keep it for good.
    """
    made: dict[tuple[Any, ...], DeviceMesh] = {}

    def reused(device_type: str, ranks: Tensor, mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
        key = (device_type, ranks.shape, mesh_dim_names)
        if key not in made:
            made[key] = DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names)
        return copy.copy(made[key])  # a run sets attributes of its mesh

    mock.patch("forge_core.parallel.mesh.DeviceMesh", reused).start()


def _collect(processes: list[Any], results: Any, deadline: float) -> list[Any]:
    values: dict[int, bytes] = {}
    errors: dict[int, str] = {}
    while len(values) + len(errors) < len(processes) and not errors:
        try:
            rank, good, value = results.get(timeout=0.1)
            (values if good else errors)[rank] = value
        except Empty:
            dead = [i for i, p in enumerate(processes) if p.exitcode not in (None, 0) and i not in errors]
            if dead or time.monotonic() > deadline:
                raise AssertionError(f"ranks {dead} died" if dead else "timed out") from None
    if errors:
        raise AssertionError("\n".join(f"rank {rank}: {error}" for rank, error in errors.items()))
    loaded = [torch.load(io.BytesIO(values[rank]), weights_only=False) for rank in sorted(values)]
    for _, modules in loaded:
        _imported_by_ranks.update(modules)
    return [value for value, _ in loaded]
