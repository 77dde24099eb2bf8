"""Measures on this machine how documents in a sequence are kept apart fastest, and prints `document_backends.toml`.

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive python document_backends.py > table.toml

Like `attention_backends.py` beside it. Work done once for all layers, such as making the mask, is left out.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from datetime import date
from itertools import product

import torch
from attention_backends import HEADS, KV_HEADS, LENGTHS, WIDTHS, machine, milliseconds
from torch import Tensor

from forge_plugin_transformer.attention_backends import Choice, Kernel
from forge_plugin_transformer.document_backends import DocumentChoice, Way, able
from forge_plugin_transformer.modules.attention_core import AttentionCore

HEADER = """\
# Made by benchmarks/document_backends.py: one forward and backward pass of causal attention within documents over
# {tokens} tokens, with 8 query heads and 4 key/value heads, in milliseconds of processor time over all threads (cuda:
# of device time); one figure for each length of document, or of the sequence where that is shorter.
date = "{date}"
machine = "{machine}, torch {torch}"
documents = {documents}"""
TOKENS = 2048
DOCUMENTS = (64, 256, 1024)
KERNELS: tuple[Kernel, ...] = ("flash", "gemm", "efficient", "cudnn", "math")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="in a micro-batch, whatever the length")
    options = parser.parse_args()
    device, documents = torch.device(options.device), list(DOCUMENTS)
    facts = {"date": date.today(), "machine": machine(device), "torch": torch.__version__, "documents": documents}
    print(HEADER.format(tokens=options.tokens, **facts))
    dtypes = [getattr(torch, dtype) for dtype in options.dtypes]
    for dtype, kernel, length, width in product(dtypes, KERNELS, options.lengths, WIDTHS):
        shape = (max(1, options.tokens // length), length, width // HEADS)
        if len(able(device.type, name(dtype), kernel)) > 1:
            times = [measure(device, dtype, kernel, shape, document, options.rounds) for document in DOCUMENTS]
            print("\n".join(["", "[[measurement]]", *row(device, dtype, kernel, shape, times)]), flush=True)


def measure(
    device: torch.device, dtype: torch.dtype, kernel: Kernel, shape: tuple[int, int, int], document: int, rounds: int
) -> dict[Way, float]:
    """Median milliseconds of each way, rounds interleaved, the first left out."""
    ways = able(device.type, name(dtype), kernel)
    passes = {way: one_pass(way, kernel, device, dtype, shape, document) for way in ways}
    times: dict[Way, list[float]] = {way: [] for way in passes}
    for _ in range(rounds + 1):
        for way, run in passes.items():
            times[way].append(milliseconds(run, device))
    return {way: statistics.median(values[1:]) for way, values in times.items()}


def one_pass(
    way: Way, kernel: Kernel, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], document: int
) -> Callable[[], None]:
    batch, length, head_dim = shape

    def random(heads: int) -> Tensor:
        return torch.randn(batch, length, heads, head_dim, dtype=dtype, device=device).requires_grad_()

    core = AttentionCore(Choice(kernel, ""), DocumentChoice(way, ""))
    (q, k, v), grad = map(random, (HEADS, KV_HEADS, KV_HEADS)), random(HEADS)
    ids = (torch.arange(length, device=device) // document).expand(batch, -1)
    prepared = core.prepare({"document_ids": ids})

    def run() -> None:
        torch.autograd.grad(core(q, k, v, prepared), (q, k, v), grad)

    return run


def row(
    device: torch.device, dtype: torch.dtype, kernel: Kernel, shape: tuple[int, int, int], times: list[dict[Way, float]]
) -> Iterator[str]:
    yield f'device = "{device.type}"'
    yield f'dtype = "{name(dtype)}"'
    yield f'kernel = "{kernel}"'
    yield f"seq_len = {shape[1]}"
    yield f"head_dim = {shape[2]}"
    figures = {way: ", ".join(f"{float(f'{time[way]:.3g}'):g}" for time in times) for way in times[0]}
    yield "milliseconds = { " + ", ".join(f"{way} = [{values}]" for way, values in figures.items()) + " }"


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
