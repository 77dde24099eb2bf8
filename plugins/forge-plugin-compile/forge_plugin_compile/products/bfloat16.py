"""bfloat16 products in float32, on a processor that has neither kind of instruction for them.

Without AVX-512, torch and MKL multiply bfloat16 number by number: ten to fifty times as slowly as float32. Products of
bfloat16 numbers are exact in float32, and processors that multiply bfloat16 add up in float32 and round once, at the
end. Widening the operands, multiplying in float32 and rounding the result is therefore the same computation, with sums
in another order. Operands that are widened need memory for the time of a product: twice their own.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor

from forge_plugin_compile.products.dispatch import Call

LEAST = 2**15
"""Multiplications from which float32 is faster: 32 x 32 x 32."""
LEAST_ROWS = 8
"""With fewer rows, as in a step of generation, widening the second matrix takes longer than the product."""


class InFloat32:
    """A way for bfloat16 products: float32, rounded once."""

    @staticmethod
    def helps() -> bool:
        """Returns whether torch multiplies bfloat16 number by number on this processor."""
        return platform.machine() in ("x86_64", "AMD64") and torch.backends.cpu.get_cpu_capability() in (
            "AVX2",
            "DEFAULT",
        )

    def takes(self, kernel: str, a: Tensor, b: Tensor) -> bool:
        """Returns whether two operands are bfloat16 and large enough; those of attention always are."""
        if a.dtype != torch.bfloat16:
            return False
        return "attention" in kernel or (a.shape[-2] >= LEAST_ROWS and a.numel() * b.shape[-1] >= LEAST)

    def compute(self, call: Call, kernel: str, *arguments: Any, **options: Any) -> Any:
        """Returns the product, rounded to bfloat16; attention's sums of exponentials remain float32."""
        target = options.pop("out", arguments[0] if kernel.endswith("_") else None)
        widened = [_widen(each) for each in arguments]
        options = {name: _widen(value) for name, value in options.items()}
        if kernel.endswith(".out"):
            options["out"] = torch.empty(0, dtype=torch.float32)
        found = call(*widened, **options)
        if target is not None:
            return target.resize_(found.shape).copy_(found)
        if isinstance(found, Tensor):
            return found.bfloat16()
        if kernel.endswith("backward"):
            return tuple(each.bfloat16() for each in found)
        output, logsumexp = found
        return output.bfloat16(), logsumexp


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
