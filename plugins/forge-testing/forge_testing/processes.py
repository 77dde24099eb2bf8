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
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from forge_kit.tools.forks import collect_own_garbage, collector_paused
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
"""Seconds after which processes are considered deadlocked. No function of a test takes as long, even on a busy machine,
so reaching it is an error of the code."""


def prepare_to_fork() -> None:
    """Make forked processes able to run a backward pass, whatever this process runs before it forks them.

    autograd starts its threads in the first backward pass of a process, and refuses to run in forks of a process with
    threads. It starts them for devices only; but a CUDA build of torch without a GPU has a device as soon as a
    `FakeTensorMode` was entered, which compilation and plans do. So the first backward pass has to be before that.
    """
    # With a GPU it would start the threads itself; and a build for the CPU never has such a device.
    if torch.backends.cuda.is_built() and torch.cuda.device_count() == 0:
        torch.zeros(1, requires_grad=True).sum().backward()


def run_on_ranks(ranks: int, function: Callable[[int], Any], timeout: float = HANG_S) -> list[Any]:
    """Run `function(rank)` on every rank, each a forked process of one gloo group.

    Args:
        ranks: World size.
        function: Called in each process. Its result is pickled.
        timeout: Seconds until all ranks are killed.

    Returns:
        The results, in the order of ranks.

    Raises:
        AssertionError: A rank failed (its traceback is the message), or the timeout was reached.
    """
    done, error = run_in_turn_on_ranks(ranks, [function], timeout)
    if error:
        raise AssertionError(error)
    return done[0]


def run_in_turn_on_ranks(
    ranks: int, functions: Sequence[Callable[[int], Any]], timeout: float = HANG_S
) -> tuple[list[list[Any]], str]:
    """Run functions one after another on the same ranks, until one of them fails.

    Args:
        ranks: World size.
        functions: Each is called in every process, when all processes have ended the one before.
        timeout: Seconds that one of the functions may take.

    Returns:
        What each function returned, in the order of ranks, up to the first function that failed; and the traceback of
        that one, or that its ranks died or took too long; empty if none failed.
    """
    for name in IMPORTED:
        importlib.import_module(name)
    while _imported_by_ranks:
        with suppress(ImportError):  # of a package that a test has removed since
            importlib.import_module(_imported_by_ranks.pop())
    context = _context_of_forks()
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        args = [(rank, ranks, functions, Path(folder) / "meet", timeout, pipes) for rank in range(ranks)]
        processes = [context.Process(target=_rank, args=arguments) for arguments in args]
        with collector_paused():
            for process in processes:
                process.start()
        for _, sending in pipes:
            sending.close()  # so that reading ends where the rank has
        try:
            return _collect([reading for reading, _ in pipes], len(functions), timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for reading, _ in pipes:
                reading.close()


def exit_code_of_fork(function: Callable[..., Any], *arguments: Any, timeout: float = HANG_S) -> int:
    """Call a function in a fork of this process, one that dies for example.

    Args:
        function: What it raises is printed by the fork, whose exit code is 1 then.
        arguments: Of the function.
        timeout: Seconds until the fork is ended.

    Returns:
        The exit code; the negative number of the signal, if one has ended the fork.

    Raises:
        AssertionError: The timeout was reached.
    """
    process = _context_of_forks().Process(target=_called, args=(function, arguments, timeout))
    with collector_paused():
        process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError("timed out")
    return process.exitcode


def endanger_forks() -> None:
    """From here on, each fork of this process inherits a process group that is garbage, and allocates much at once.

    Its collector would hang: freeing the group waits for threads that a fork does not copy. There is no way back, so
    call it in a process that ends, such as one of `exit_code_of_fork`.
    """

    def make_garbage() -> None:
        ring: list[Any] = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1)]  # type: ignore[attr-defined, call-arg]
        ring.append(ring)

    os.register_at_fork(before=make_garbage, after_in_child=lambda: [[] for _ in range(100_000)])


def _called(function: Callable[..., Any], arguments: Sequence[Any], timeout: float) -> None:
    collect_own_garbage()
    faulthandler.dump_traceback_later(0.95 * timeout, exit=True)  # before the parent's own limit
    function(*arguments)


def _context_of_forks() -> Any:
    """Make this process ready to be forked, and return the context of processes that are forks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    # pytest's `faulthandler_timeout` is a thread, which a fork does not copy, and forks would wait for its end
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    return multiprocessing.get_context("fork")


def _rank(
    rank: int,
    ranks: int,
    functions: Sequence[Callable[[int], Any]],
    meet: Path,
    timeout: float,
    pipes: Sequence[tuple[Connection, Connection]],
) -> None:
    collect_own_garbage()
    for other, (reading, sending) in enumerate(pipes):
        reading.close()
        if other != rank:
            sending.close()
    results = pipes[rank][1]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # unused: the group is created below
    torch.set_num_threads(1)
    try:
        share_device_of_gloo()
        dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks)
        _reuse_meshes()
        before = set(sys.modules)
        for number, function in enumerate(functions):
            faulthandler.dump_traceback_later(0.95 * timeout, exit=True)  # before the parent's own limit
            if number:  # no rank is in a later function than another, whose failure would be taken for one there
                dist.barrier()
            value = function(rank)
            imported = [name for name in set(sys.modules) - before if name.startswith("forge_plugin_")]
            buffer = io.BytesIO()
            # Tensors as bytes: otherwise their shared memory would be requested after the process has ended.
            torch.save((True, value, imported), buffer)
            results.send_bytes(buffer.getvalue())  # ends when the parent has read it, or it is in the pipe
    except BaseException:
        buffer = io.BytesIO()
        torch.save((False, traceback.format_exc(), []), buffer)
        results.send_bytes(buffer.getvalue())
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


def _collect(results: Sequence[Connection], functions: int, timeout: float) -> tuple[list[list[Any]], str]:
    """Return the results of the first functions that ended on all ranks, and the error of the next one."""
    values: list[list[Any]] = [[] for _ in results]
    errors: dict[int, str] = {}
    gone: list[int] = []

    def read_what_is_there() -> None:
        for rank, connection in enumerate(results):
            while rank not in gone and connection.poll():
                try:
                    data = connection.recv_bytes()
                except (EOFError, ConnectionResetError):
                    gone.append(rank)
                    continue
                good, value, modules = torch.load(io.BytesIO(data), weights_only=False)
                _imported_by_ranks.update(modules)
                if good:
                    values[rank].append(value)
                else:
                    errors[rank] = value

    ended, deadline = 0, time.monotonic() + timeout
    while ended < functions and not errors and not gone and time.monotonic() < deadline:
        wait(results, timeout=max(deadline - time.monotonic(), 0))
        read_what_is_there()
        if min(map(len, values)) > ended:
            ended, deadline = min(map(len, values)), time.monotonic() + timeout
    read_what_is_there()  # what others had sent by then: results of functions before the one that failed
    error = "\n".join(f"rank {rank}: {text}" for rank, text in errors.items())
    if ended < functions and not error:
        error = f"ranks {gone} died" if gone else "timed out"
    return [list(of_ranks) for of_ranks in zip(*values, strict=False)], error
