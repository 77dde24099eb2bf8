"""Products of experts: grouped ones against a loop in float64, and their speed."""

from __future__ import annotations

import torch
from torch import Tensor

from forge_plugin_moe.modules.experts import PLAIN, Experts, SwiGLUForm, runs_grouped
from forge_plugin_transformer import InitStd
from gpu.bench import Bench, piece, relative_error


@piece("experts", "grouped products against a loop in float64, with an expert without tokens, and their speed")
def experts(bench: Bench) -> None:
    for dtype, limit in ((torch.bfloat16, 2e-2), (torch.float32, 1e-4)):
        for grouped in (True, False):
            if grouped and not runs_grouped(bench.device, dtype):
                continue
            for biases in (False, True):
                with bench.case(f"grouped {grouped}, {dtype}, biases {biases}"):
                    _compare(bench, grouped, dtype, limit, biases)
    for number, chosen, hidden in ((8, 2, 5632), (64, 8, 1408)):
        for grouped in (True, False):
            with bench.case(f"grouped {grouped}, {number} experts"):
                _time(bench, grouped, number, chosen, bench.size(hidden, 64))


def _stack(number: int, dim: int, hidden: int, grouped: bool, device: torch.device, biases: bool = False) -> Experts:
    """With biases, SwiGLU is that of gpt-oss but for its bound, where derivatives jump and rounding decides sides."""
    form = SwiGLUForm(alpha=1.702, offset=1.0) if biases else PLAIN
    init = InitStd(inner=0.02, residual=0.02)
    stack = Experts(number, dim, hidden, init=init, grouped=grouped, bias=biases, swiglu=form)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return stack.to(device)


def _choices(tokens: int, number: int, chosen: int) -> tuple[Tensor, Tensor]:
    """Weights and different experts for each token, at random; the last expert is never chosen."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(tokens, number - 1, generator=generator)
    best = scores.topk(chosen)
    return best.values, best.indices


def _compare(bench: Bench, grouped: bool, dtype: torch.dtype, limit: float, biases: bool) -> None:
    number, dim, hidden, tokens = 8, bench.size(256, 32), bench.size(512, 64), bench.size(1000, 50)
    x = torch.randn(tokens, dim, generator=torch.Generator().manual_seed(2)).to(dtype)
    weights, chosen = _choices(tokens, number, 2)
    reference = _stack(number, dim, hidden, False, torch.device("cpu"), biases).double()
    expected = _run(reference, x.double(), weights, chosen)
    device = bench.device
    stack = _stack(number, dim, hidden, grouped, device, biases)
    found = _run(stack, x.to(device), weights.to(device), chosen.to(device))
    error = max(relative_error(own, exact) for own, exact in zip(found, expected, strict=True))
    how = "grouped" if grouped else "loop"
    bench.within(
        "error against float64", error, limit, products=how, dtype=str(dtype).removeprefix("torch."), biases=biases
    )


def _run(stack: Experts, x: Tensor, weights: Tensor, chosen: Tensor) -> list[Tensor]:
    """The result, and the gradients of inputs and weights."""
    x = x.detach().requires_grad_()
    out = stack(x, weights.to(torch.promote_types(x.dtype, torch.float32)), chosen, rows=chosen.numel())
    grad = torch.ones_like(out) * torch.linspace(-1, 1, len(out), device=out.device, dtype=out.dtype)[:, None]
    return [out, *torch.autograd.grad(out, (x, *stack.parameters()), grad)]


def _time(bench: Bench, grouped: bool, number: int, chosen: int, hidden: int) -> None:
    """Forward and backward of a stack over 16,384 tokens of width 2,048."""
    tokens, dim = bench.size(16_384, 64), bench.size(2048, 32)
    stack = _stack(number, dim, hidden, grouped, bench.device)
    weights, choices = (tensor.to(bench.device) for tensor in _choices(tokens, number, chosen))
    x = torch.randn(tokens, dim, device=bench.device, dtype=torch.bfloat16)
    bench.reset_peak()
    ms = bench.milliseconds(lambda: _run(stack, x, weights, choices))
    operations = 3 * 6 * tokens * chosen * dim * hidden
    peak = bench.peak_bytes()
    bench.row(
        "forward and backward",
        experts=number,
        of_a_token=chosen,
        hidden=hidden,
        products="grouped" if grouped else "loop",
        ms=ms,
        tflops=operations / ms / 1e9,
        peak_gb=None if peak is None else peak / 1e9,
    )
