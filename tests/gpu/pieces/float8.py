"""Products in float8, against the same rounding multiplied in float32, and against no rounding."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from forge_kit.nn.modules import Linear
from gpu.bench import Bench, piece, relative_error

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
EMULATION = 1e-2
"""Of a product by float8 units, whose fast accumulation rounds, to one in float32 of the same rounded operands."""
ROUNDING = 6e-2
"""Of e4m3's 3 bits of mantissa, or e5m2's 2 in gradients, over random operands."""


@piece("float8", "rowwise and tensorwise products against their reference, and their speed", requires=["torchao"])
def float8(bench: Bench) -> None:
    if not bench.on_gpu:
        bench.notes.append("A CPU has no float8 units: the products of torch's CPU kernels are compared.")
    recipes = RECIPES if bench.on_gpu or _has_rows_on_cpu() else RECIPES[:1]
    if recipes != RECIPES:
        bench.notes.append("This torch has no kernel with a scale per row for CPUs: tensorwise products only.")
    for recipe in recipes:
        with bench.case(recipe):
            _compare(bench, recipe)
            _time(bench, recipe)


def _has_rows_on_cpu() -> bool:
    """Whether torch multiplies with a scale per row on CPUs: 2.11 does not."""
    operand, scales = torch.zeros(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(operand, operand.t(), scales, scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def _layer(bench: Bench, size: int, recipe: str | None, emulate: bool) -> Linear:
    layer = Linear(size, size, std=0.02).to(bench.device)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(size, size, generator=torch.Generator().manual_seed(0)) * 0.02)
    if recipe is not None:
        from torchao.float8 import Float8LinearConfig

        from forge_plugin_lowbit.float8.product import multiply_in_float8

        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
        multiply_in_float8(layer, config)
    return layer


def _products(bench: Bench, layer: Linear, size: int) -> list[torch.Tensor]:
    """The result, and the gradients of inputs and weight."""
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(bench.size(2048, 64), size, generator=generator).bfloat16() for _ in range(2))
    x = x.to(bench.device).requires_grad_()
    out = layer(x)
    return [out, *torch.autograd.grad(out, (x, layer.weight), grad.to(bench.device))]


def _compare(bench: Bench, recipe: str) -> None:
    size = bench.size(1024, 64)
    exact = _products(bench, _layer(bench, size, None, False), size)
    emulated = _products(bench, _layer(bench, size, recipe, True), size)
    real = _products(bench, _layer(bench, size, recipe, False), size)
    for what, own, reference, plain in zip(("result", "to input", "to weight"), real, emulated, exact, strict=True):
        cells: dict[str, Any] = {"recipe": recipe, "what": what}
        bench.within(
            "error against the same operands multiplied in float32", relative_error(own, reference), EMULATION, **cells
        )
        limit = ROUNDING * (2 if what != "result" and recipe == "tensorwise" else 1)
        bench.within("error against bf16", relative_error(own, plain), limit, **cells)


def _time(bench: Bench, recipe: str) -> None:
    """Forward and backward of one layer of 4,096 x 4,096 over 8,192 rows, compiled."""
    size, rows = bench.size(4096, 64), bench.size(8192, 64)
    x = torch.randn(rows, size, device=bench.device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    for name, layer in {"bf16": _layer(bench, size, None, False), recipe: _layer(bench, size, recipe, False)}.items():
        if not bench.tiny:
            layer.compile()
        ms = bench.milliseconds(lambda layer=layer: torch.autograd.grad(layer(x), (x, layer.weight), grad))
        bench.row("speed", recipe=name, ms=ms, tflops=6 * rows * size * size / ms / 1e9)
