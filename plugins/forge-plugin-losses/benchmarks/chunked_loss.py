"""CPU time and memory of losses over a linear head, forward and backward, interleaved in one process.

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive python benchmarks/chunked_loss.py [--dim 256] [--vocab 8192] …

CPU time (all threads) is what to compare on a machine that others use. Memory is the growth of the resident set over
one call, beyond inputs and gradients. Results are kept in ../README.md.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forge_core.losses import cross_entropy_loss
from forge_kit.nn.modules import LinearHead
from forge_plugin_losses.vocabulary_chunks import chunked_loss

Contender = Callable[[LinearHead, Tensor, Tensor], Tensor]


def plain(head: LinearHead, hidden: Tensor, labels: Tensor) -> Tensor:
    """The usual training loop: all logits, in float32."""
    return F.cross_entropy(head(hidden).float(), labels, reduction="sum")


def core(head: LinearHead, hidden: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy_loss(None)(head, hidden[None], {"labels": labels[None]}).sum


class Loop(torch.autograd.Function):
    """Chunks with the gradient made in the forward pass, in the obvious way: a tensor for every intermediate."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        to_hidden, to_weight, total = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32), 0.0
        for h, y, out in zip(hidden.split(256), labels.split(256), to_hidden.split(256), strict=True):
            logits = (h @ weight.T).float()
            logsumexp = logits.logsumexp(-1, keepdim=True)
            total = total + (logsumexp - logits.gather(1, y[:, None])).sum()
            gradient = (logits - logsumexp).exp()
            gradient[torch.arange(len(y)), y] -= 1
            gradient = gradient.to(hidden.dtype)
            out.copy_(gradient @ weight)
            to_weight += gradient.T @ h
        ctx.save_for_backward(to_hidden, to_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        to_hidden, to_weight = ctx.saved_tensors
        return to_hidden * grad, to_weight * grad, None


def loop(head: LinearHead, hidden: Tensor, labels: Tensor) -> Tensor:
    return Loop.apply(hidden, head.weight.to(hidden.dtype), labels)


def builtin(head: LinearHead, hidden: Tensor, labels: Tensor) -> Tensor:
    """torch's own chunked loss, from 2.13 on."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=512)
    weight = head.weight.to(hidden.dtype)
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


def ours(chunk: int) -> Contender:
    loss = chunked_loss(chunk, None)
    return lambda head, hidden, labels: loss(head, hidden[None], {"labels": labels[None]}).sum


def contenders(chunks: list[int]) -> dict[str, Contender]:
    found: dict[str, Contender] = {"plain": plain, "cross_entropy": core, "loop of 256": loop}
    if hasattr(F, "linear_cross_entropy"):
        found["linear_cross_entropy of 512"] = builtin
    return found | {f"chunked_cross_entropy of {chunk}": ours(chunk) for chunk in chunks}


def peak_growth(call: Callable[[], None]) -> float:
    """MiB by which the resident set grows at most during `call`."""
    ctypes.CDLL(None).malloc_trim(0)  # give back what earlier calls freed
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = _resident("VmRSS")
    call()
    return (_resident("VmHWM") - before) / 1024


def _resident(key: str) -> int:
    match = re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match
    return int(match[1])


def measure(arguments: argparse.Namespace, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    head = LinearHead(arguments.dim, arguments.vocab)
    torch.nn.init.normal_(head.weight, std=0.02)
    hidden = torch.randn(arguments.tokens, arguments.dim, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, arguments.vocab, (arguments.tokens,))
    named = contenders(arguments.chunks)

    def step(contender: Contender) -> None:
        (contender(head, hidden, labels) / arguments.tokens).backward()

    memory = {name: peak_growth(lambda c=c: step(c)) for name, c in named.items()}
    cpu: dict[str, list[float]] = {name: [] for name in named}
    wall: dict[str, list[float]] = {name: [] for name in named}
    for _ in range(arguments.rounds):
        for name, contender in named.items():
            hidden.grad = head.weight.grad = None
            step(contender)  # the contender before has turned the caches over
            hidden.grad = head.weight.grad = None
            started, process = time.perf_counter(), time.process_time()
            step(contender)
            cpu[name].append(time.process_time() - process)
            wall[name].append(time.perf_counter() - started)
    report(arguments, dtype, {n: statistics.median(t) for n, t in cpu.items()}, wall, memory)


def report(
    arguments: argparse.Namespace,
    dtype: torch.dtype,
    cpu: dict[str, float],
    wall: dict[str, list[float]],
    memory: dict[str, float],
) -> None:
    print(f"\n{dtype}, {arguments.tokens} tokens, dim {arguments.dim}, vocabulary {arguments.vocab}")
    print("| loss | CPU ms | of plain | wall ms (best) | MiB |\n|---|---|---|---|---|")
    for name, seconds in cpu.items():
        ratio = seconds / cpu["plain"]
        print(f"| {name} | {seconds * 1e3:.0f} | {ratio:.2f} | {min(wall[name]) * 1e3:.0f} | {memory[name]:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    arguments = parser.parse_args()
    for dtype in arguments.dtypes:
        measure(arguments, getattr(torch, dtype))


if __name__ == "__main__":
    main()
