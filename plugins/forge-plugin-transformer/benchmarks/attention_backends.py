"""Measures the attention backends of this machine and prints `attention_backends.toml`.

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive python attention_backends.py > table.toml

On a CPU it is processor time over all threads, which a busy neighbour disturbs least; on CUDA, time between events. A
figure is the median over interleaved rounds of one forward and backward pass from (B, S, heads, head_dim) and back.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import date
from itertools import product

import torch
from torch import Tensor

from forge_kit.nn.products import multiplied_by, multiply_by
from forge_plugin_compile.products.dispatch import take_over
from forge_plugin_compile.products.onednn import ByOneDNN
from forge_plugin_transformer.attention_backends import SUPPORTED, Choice, Kernel
from forge_plugin_transformer.document_backends import DocumentChoice
from forge_plugin_transformer.modules.attention_core import AttentionCore

HEADER = """\
# Made by benchmarks/attention_backends.py: one forward and backward pass of causal attention over {tokens} tokens, with
# 8 query heads and 4 key/value heads, in milliseconds of processor time over all threads (cuda: of device time).
date = "{date}"
machine = "{machine}, torch {torch}\""""
TOKENS = 2048
LENGTHS = (128, 256, 512, 1024, 2048)
WIDTHS = (256, 512)
HEADS, KV_HEADS = 8, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="in a micro-batch, whatever the length")
    options = parser.parse_args()
    device = torch.device(options.device)
    print(HEADER.format(tokens=options.tokens, date=date.today(), machine=machine(device), torch=torch.__version__))
    for (dtype, by_onednn), length, width in product(variants(device), LENGTHS, WIDTHS):
        take_over(*([ByOneDNN()] if by_onednn else []))
        multiply_by("oneDNN" if by_onednn else None, torch.float32)
        shape = (max(1, options.tokens // length), length, width // HEADS)
        times = measure(device, dtype, shape, options.rounds)
        print("\n".join(["", "[[measurement]]", *row(device, dtype, shape, times)]), flush=True)


def variants(device: torch.device) -> list[tuple[torch.dtype, bool]]:
    """Dtypes, and whether oneDNN multiplies float32: by BLAS, and by oneDNN where [plugins.cpu_products] takes that."""
    further = [(torch.float32, True)] if device.type == "cpu" and ByOneDNN.helps() else []
    return [(torch.bfloat16, False), (torch.float32, False), *further]


def measure(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], rounds: int) -> dict[Kernel, float]:
    """Median milliseconds of each kernel that runs there, rounds interleaved, the first left out."""
    passes = {kernel: one_pass(kernel, device, dtype, shape) for kernel in kernels(device, dtype)}
    times: dict[Kernel, list[float]] = {kernel: [] for kernel in passes}
    for _ in range(rounds + 1):
        for kernel, run in passes.items():
            times[kernel].append(milliseconds(run, device))
    return {kernel: statistics.median(values[1:]) for kernel, values in times.items()}


def kernels(device: torch.device, dtype: torch.dtype) -> list[Kernel]:
    name = str(dtype).removeprefix("torch.")
    return [kernel for kernel, dtypes in SUPPORTED[device.type].items() if name in dtypes]


def one_pass(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> Callable[[], None]:
    batch, length, head_dim = shape

    def random(heads: int) -> Tensor:
        return torch.randn(batch, length, heads, head_dim, dtype=dtype, device=device).requires_grad_()

    core = AttentionCore(Choice(kernel, ""), DocumentChoice("mask", ""))
    (q, k, v), grad = map(random, (HEADS, KV_HEADS, KV_HEADS)), random(HEADS)

    def run() -> None:
        torch.autograd.grad(core(q, k, v, {}), (q, k, v), grad)

    return run


def milliseconds(run: Callable[[], None], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.process_time()
        run()
        return (time.process_time() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def row(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], times: dict[Kernel, float]
) -> Iterator[str]:
    yield f'device = "{device.type}"'
    yield f'dtype = "{str(dtype).removeprefix("torch.")}"'
    if device.type == "cpu" and dtype == torch.float32:
        yield f'products = "{multiplied_by(dtype)}"'
    yield f"seq_len = {shape[1]}"
    yield f"head_dim = {shape[2]}"
    yield "milliseconds = { " + ", ".join(f"{kernel} = {value:.3g}" for kernel, value in times.items()) + " }"


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with open("/proc/cpuinfo") as lines:
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{torch.get_num_threads()} threads of {names[0] if names else platform.processor()}"


if __name__ == "__main__":
    main()
