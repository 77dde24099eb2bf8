"""The library that multiplies matrices on a CPU, for code whose speed depends on it.

torch itself sends 16-bit products to oneDNN and float32 ones to its BLAS. A plugin that changes the latter for a run
(`forge-plugin-compile`) notes it here, since both are properties of the process and not of a component.
"""

from __future__ import annotations

from typing import Literal

import torch

CPULibrary = Literal["BLAS", "oneDNN"]

MULTIPLE = 32
"""oneDNN's float32 products are the faster ones where sizes are multiples of this."""

_libraries: dict[torch.dtype, CPULibrary] = {torch.float32: "BLAS"}


def multiplied_by(dtype: torch.dtype) -> CPULibrary:
    """Returns the library that computes large products of matrices of a dtype on a CPU, in this process."""
    return _libraries.get(dtype, "oneDNN" if dtype.itemsize == 2 else "BLAS")


def size_multiple(dtype: torch.dtype) -> int:
    """Returns the multiple to which sizes that vary from step to step are best padded on a CPU.

    oneDNN compiles a kernel for every size, so few sizes are better; 1 where that does not matter.
    """
    return MULTIPLE if multiplied_by(dtype) == "oneDNN" else 1


def multiply_float32_by(library: CPULibrary) -> None:
    """Record the library of float32 products from now on, for a plugin that changes it and changes it back."""
    _libraries[torch.float32] = library
