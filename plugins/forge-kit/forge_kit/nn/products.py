"""The library that multiplies matrices on a CPU, for code whose speed depends on it.

torch itself sends 16-bit products to oneDNN and float32 ones to its BLAS. A plugin that changes this for a run
(`forge-plugin-compile`) notes it here, since it is a property of the process and not of a component.
"""

from __future__ import annotations

from typing import Literal

import torch

CPULibrary = Literal["BLAS", "oneDNN"]

MULTIPLE = 32
"""oneDNN's float32 products are the faster ones where sizes are multiples of this."""

_libraries: dict[torch.dtype, CPULibrary] = {}


def multiplied_by(dtype: torch.dtype) -> CPULibrary:
    """Returns the library that computes large products of matrices of a dtype on a CPU, in this process."""
    return _libraries.get(dtype, "oneDNN" if dtype.itemsize == 2 else "BLAS")


def size_multiple(dtype: torch.dtype) -> int:
    """Returns the multiple to which sizes that vary from step to step are best padded on a CPU.

    oneDNN compiles a kernel for every size, so few sizes are better; 1 where that does not matter.
    """
    return MULTIPLE if multiplied_by(dtype) == "oneDNN" else 1


def multiply_by(library: CPULibrary | None, *dtypes: torch.dtype) -> None:
    """Record the library of these dtypes' products, for a plugin that changes it; None: torch's own choice again."""
    for dtype in dtypes:
        if library is None:
            _libraries.pop(dtype, None)
        else:
            _libraries[dtype] = library
