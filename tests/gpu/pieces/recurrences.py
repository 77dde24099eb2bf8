"""Mixers with a recurrence, by torch and by the kernels of flash-linear-attention where they are installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

from forge_plugin_linear_attention import KDA, GatedDeltaNet, Mamba2
from forge_plugin_linear_attention.kernels import KernelChoice
from forge_plugin_transformer import AttentionComponent, InitStd
from gpu.bench import Bench, piece, relative_error

LIMIT = 3e-2
"""Largest error of results and gradients in bfloat16."""


@piece("recurrences", "Gated DeltaNet, KDA and Mamba-2 against float64, by torch's products and by Triton kernels")
def recurrences(bench: Bench) -> None:
    dim, length = bench.size(1024, 32), bench.size(4096, 64)
    width = bench.size(128, 8)
    mixers: dict[str, AttentionComponent] = {
        "gated_deltanet": GatedDeltaNet(heads=4, key_heads=2, head_dim=width),
        "kda": KDA(heads=4, head_dim=width),
        "mamba2": Mamba2(heads=4, head_dim=width, state=width),
    }
    for (name, component), documents in product(mixers.items(), (False, True)):
        at_home: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float64, path=name)
        reference: Any = component.build(at_home, dim, InitStd(0.02, 0.02)).double()
        generator = torch.Generator().manual_seed(0)
        for parameter in reference.parameters():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(0.1).bfloat16())
        short = bench.size(256, 64)  # of which float64 on a CPU is soon done
        x = torch.randn(2, short, dim, generator=generator).bfloat16().double()
        ids = torch.arange(short).ge(short // 3).long().expand(2, -1).contiguous()
        expected = _results(reference, x, {"document_ids": ids} if documents else {})
        layer = reference.to(bench.device, torch.bfloat16)
        for kernel in _kernels(bench):
            with bench.case(f"{name}, {kernel}, documents {documents}"):
                layer.core.choice = KernelChoice(kernel, "set by the piece")  # type: ignore[arg-type]
                batch = {"document_ids": ids.to(bench.device)} if documents else {}
                found = _results(layer, x.to(bench.device, torch.bfloat16), batch)
                error = max(relative_error(*pair) for pair in zip(found, expected, strict=True))
                cells = {"mixer": name, "kernel": kernel, "documents": documents}
                bench.within("error against float64", error, LIMIT, **cells)
                long = torch.randn(1, length, dim, device=bench.device, dtype=torch.bfloat16)
                bench.row("milliseconds forward and backward", **cells, ms=_time(bench, layer, long))


def _kernels(bench: Bench) -> Iterator[str]:
    yield "torch"
    if bench.on_gpu and find_spec("fla"):
        yield "fla"
    elif bench.on_gpu:
        bench.notes.append("flash-linear-attention is not installed, so its kernels were not tried")


def _results(layer: Any, x: torch.Tensor, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What a layer returns, and the gradient of its sum of squares by its input."""
    x = x.clone().requires_grad_()
    y = layer(x, batch)
    return [y, *torch.autograd.grad(y.float().square().sum(), [x])]


def _time(bench: Bench, layer: Any, x: torch.Tensor) -> float:
    x.requires_grad_()
    return bench.milliseconds(lambda: torch.autograd.grad(layer(x, {}).sum(), [x, *layer.parameters()]))
