"""One rank of the trial: `python -m forge_plugin_plan.doctor.rank RANK SIZE PORT`.

It prints a JSON object a line: what it is doing (`phase`), what it found out (`facts`), and a result of each collective
(`collective`). Values are whole numbers, so that sums are exact in whatever order they are added.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from forge_plugin_plan.devices import wait_for

LARGE = 4 * 2**20
"""Elements of a large tensor: 16 MiB of float32."""
SMALL = 1024
LIMIT_S = 20.0
SIZES = (1024, 2048, 4096, 8192)
"""Of the square matrices by which a device's speed is measured; a GPU takes the last."""
ENOUGH_S = 2e-3
TIMED_S = 0.05
"""Seconds for the timing of a collective at one size."""


def main() -> None:
    """Join the other ranks, try every collective, and print what came of it."""
    rank, size, port = map(int, sys.argv[1:4])
    # Printed before each piece of work, so that the last phase shows where a rank hung
    say(phase="looking at devices")
    # Of any vendor: `cuda`, `xpu`, `mps`, or what a package registers
    found = torch.accelerator.current_accelerator(check_available=True)
    kind, gpus = (found.type, torch.accelerator.device_count()) if found else ("cpu", 0)
    say(facts=facts(kind, gpus))
    # On one rank, as ranks that compute at the same time would distort the speed
    if rank == 0:
        for number in range(gpus):
            say(phase=f"computing on GPU {number}")
            say(device=product_on(torch.device(kind, number)))
        say(device=product_on(torch.device("cpu")))
    # NCCL and its like require a separate GPU for each rank
    library = library_of(kind) if gpus >= size else ""
    if library:
        torch.get_device_module(kind).set_device(rank)
    say(phase="meeting the other ranks")
    backend = f"cpu:gloo,{kind}:{library}" if library else "gloo"
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        backend, init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S)
    )
    devices = [("gloo", torch.device("cpu"))]
    if library:
        devices.append((library, torch.device(kind, rank)))
    for name, device in devices:
        for collective in COLLECTIVES:
            say(phase=f"{collective} by {name}")
            say(collective=tried(name, collective, device, rank, size))
    say(phase="leaving")
    dist.destroy_process_group()
    say(phase="done")


def say(**entry: Any) -> None:
    """Print a line for the process that started this one."""
    print(json.dumps(entry), flush=True)


def library_of(kind: str) -> str:
    """Returns torch's own library of collectives for a type of device, if this build has it; else an empty string."""
    try:
        name = dist.get_default_backend_for_device(kind)
    # A type that no library is registered for
    except ValueError:
        return ""
    # Gloo is what ranks meet by anyway
    return name if name != "gloo" and dist.is_backend_available(name) else ""


def facts(kind: str, gpus: int) -> dict[str, Any]:
    """Returns versions and devices, as torch has them; memory where the type of device states it."""
    describe = getattr(torch.get_device_module(kind), "get_device_properties", None) if gpus else None
    devices = [describe(number) for number in range(gpus)] if describe else []
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gpus": [f"{device.name}, {device.total_memory / 2**30:.0f} GiB" for device in devices] or [kind] * gpus,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if kind == "cuda" and dist.is_nccl_available() else None,
        "threads": torch.get_num_threads(),
    }


def product_on(device: torch.device) -> dict[str, Any]:
    """Multiply two matrices of whole numbers, whose product is known exactly, and measure how fast larger ones are."""
    n = 256
    rows, columns = torch.arange(n, dtype=torch.float64), torch.arange(n, dtype=torch.float64)
    a, b = (rows[:, None] + columns) % 7 - 3, (rows[:, None] * 3 + columns) % 5 - 2
    exact = a.long() @ b.long()  # integers use a different algorithm than floats
    dtypes = [torch.float32]
    a, b = a.float().to(device), b.float().to(device)
    with suppress(TypeError):  # MPS has no float64
        dtypes.append(a.double().dtype)
    right = all(bool(((a.to(d) @ b.to(d)).cpu().double() == exact).all()) for d in dtypes)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for size in SIZES:
        large = torch.ones(size, size, dtype=dtype, device=device)
        seconds = timed(partial(torch.mm, large, large), device, 0.3)
        # Large enough that the time of a call is the time of its arithmetic
        if seconds > ENOUGH_S:
            break
    return {
        "device": str(device),
        "right": right,
        "exact": [str(each).removeprefix("torch.") for each in dtypes],
        "tflops": 2 * size**3 / seconds / 1e12,
        "dtype": str(dtype).removeprefix("torch."),
    }


def tried(backend: str, name: str, device: torch.device, rank: int, size: int) -> dict[str, Any]:
    """Run a collective on small and large tensors: whether results are right, its latency and bandwidth."""
    found: dict[str, Any] = {"backend": backend, "name": name, "right": True}
    prepare, factor = COLLECTIVES[name]
    times, wrong = [], ""
    try:
        for count in (SMALL, LARGE):
            trial = prepare(count, device, rank, size)
            trial.run()
            fault = trial.wrong()
            wrong = wrong or (fault and f"{fault} with {count:,} numbers")
            times.append(timed(trial.run, device, TIMED_S))  # also where it is wrong: the other ranks wait for this one
    except (RuntimeError, ValueError, NotImplementedError) as error:
        wrong = wrong or f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    if wrong:
        return found | {"right": False, "wrong": wrong}
    # Bytes that each rank must send at least, as nccl-tests counts `busbw`.
    return found | {"latency_s": times[0], "bandwidth": 4 * LARGE * factor(size) / times[1]}


def timed(run: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Returns the median time of a call, over about so many seconds; every rank makes equally many calls."""
    run()
    first = _time(run, device)
    calls = max(3, min(20, int(seconds / max(first, 1e-6))))
    if dist.is_initialized():  # the slowest rank decides, or they would wait for each other forever
        most: list[int | None] = [None] * dist.get_world_size()
        dist.all_gather_object(most, calls)
        calls = min(count for count in most if count is not None)
    return statistics.median(_time(run, device) for _ in range(calls))


def _time(run: Callable[[], Any], device: torch.device) -> float:
    started = time.perf_counter()
    run()
    wait_for(device)
    return time.perf_counter() - started


# --- collectives -------------------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """A collective that is ready to run."""

    run: Callable[[], object]
    """May be called again, to be timed."""
    wrong: Callable[[], str]
    """After the first call: describes the error in its result; empty if the result is correct."""


def numbers(count: int, rank: int, device: torch.device) -> Tensor:
    """(count,) float32: whole numbers that differ by position and rank, small enough for exact sums."""
    return (torch.arange(count, device=device) % 1000 + 1000 * rank).float()


def sum_of_ranks(count: int, size: int, device: torch.device) -> Tensor:
    """The sum of all ranks' numbers, by the formula."""
    return size * numbers(count, 0, device) + 1000 * (size * (size - 1) // 2)


def compared(result: Tensor, expected: Tensor) -> str:
    """Describe the error in a result; empty if the result is as expected."""
    different = (result != expected).nonzero().flatten()
    if not len(different):
        return ""
    first = int(different[0])
    got, want = result[first].item(), expected[first].item()
    return f"{len(different):,} of {len(result):,} numbers are wrong, the first is {got:g} instead of {want:g}"


def all_reduce(count: int, device: torch.device, rank: int, size: int) -> Trial:
    """Sum over the ranks."""
    mine = numbers(count, rank, device)
    # In place: further calls, to be timed, change the result after it has been looked at
    return Trial(lambda: dist.all_reduce(mine), lambda: compared(mine, sum_of_ranks(count, size, device)))


def all_gather(count: int, device: torch.device, rank: int, size: int) -> Trial:
    """Every rank's part, in order."""
    part = count // size
    whole, mine = torch.empty(part * size, device=device), numbers(part, rank, device)
    expected = torch.cat([numbers(part, other, device) for other in range(size)])
    return Trial(lambda: dist.all_gather_into_tensor(whole, mine), lambda: compared(whole, expected))


def reduce_scatter(count: int, device: torch.device, rank: int, size: int) -> Trial:
    """This rank's part of the sum."""
    part = count // size
    mine, all_parts = torch.empty(part, device=device), numbers(part * size, rank, device)
    expected = sum_of_ranks(part * size, size, device)[rank * part : (rank + 1) * part]
    return Trial(lambda: dist.reduce_scatter_tensor(mine, all_parts), lambda: compared(mine, expected))


def all_to_all(count: int, device: torch.device, rank: int, size: int) -> Trial:
    """One part from each rank."""
    part = count // size
    received, sent = torch.empty(part * size, device=device), numbers(part * size, rank, device)
    parts = [numbers(part * size, other, device)[rank * part : (rank + 1) * part] for other in range(size)]
    return Trial(lambda: dist.all_to_all_single(received, sent), lambda: compared(received, torch.cat(parts)))


def broadcast(count: int, device: torch.device, rank: int, size: int) -> Trial:
    """The numbers of the last rank."""
    mine = numbers(count, rank, device)
    return Trial(lambda: dist.broadcast(mine, src=size - 1), lambda: compared(mine, numbers(count, size - 1, device)))


def send_receive(count: int, device: torch.device, rank: int, size: int) -> Trial:
    """The numbers of the rank before, in a ring."""
    received, sent = torch.empty(count, device=device), numbers(count, rank, device)
    before, after = (rank - 1) % size, (rank + 1) % size

    def run() -> None:
        # As a batch: if every rank first sent and then received, they could wait for each other forever
        operations = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return Trial(run, lambda: compared(received, numbers(count, before, device)))


def _others(size: int) -> float:
    return (size - 1) / size


COLLECTIVES: dict[str, tuple[Callable[[int, torch.device, int, int], Trial], Callable[[int], float]]] = {
    "all_reduce": (all_reduce, lambda size: 2 * _others(size)),
    "all_gather": (all_gather, _others),
    "reduce_scatter": (reduce_scatter, _others),
    "all_to_all": (all_to_all, _others),
    "broadcast": (broadcast, lambda size: 1.0),
    "send_receive": (send_receive, lambda size: 1.0),
}
"""Collectives that stages use, each with the share of its bytes that a rank must send at least."""


if __name__ == "__main__":
    main()
