"""torch's matrix products on a CPU, each offered to whoever computes it faster.

The choice is made in torch's dispatcher, below autograd and compilers, so that it applies to every product of a run.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.library import Library, get_kernel

Call = Callable[..., Any]
"""One of torch's own kernels: its arguments in, its result out."""

_FIRST = dict.fromkeys(("mm", "mm.out", "bmm", "bmm.out"), 0)
# Argument 0 is the summand
_FIRST |= {f"{name}{form}": 1 for name in ("addmm", "baddbmm") for form in ("", ".out", "_")}
"""torch's products, each with the index of its first matrix among the arguments."""
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_FIRST |= {_ATTENTION: 0, f"{_ATTENTION}_backward": 1}
"""Attention multiplies, too: queries and keys."""


class Way(Protocol):
    """A way of computing products."""

    def takes(self, kernel: str, a: Tensor, b: Tensor) -> bool:
        """Returns whether this way is the faster one for two operands of the kernel `aten::…`."""
        ...

    def compute(self, call: Call, kernel: str, *arguments: Any, **options: Any) -> Any:
        """Returns what `call(*arguments, **options)` would return, up to rounding."""
        ...


_ways: tuple[Way, ...] = ()
_library: Library | None = None


def take_over(*ways: Way) -> None:
    """Let the first of `ways` that takes a product compute it in this process, from now on; none: torch itself."""
    global _ways, _library
    if ways and _library is None:
        _library = _install()
    # The kernels stay registered and pass all products on to torch's own where there is no way.
    _ways = ways


def _install() -> Library:
    """Register kernels that take precedence over torch's own while the library object lives."""
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that kernels are overridden
        for name, first in _FIRST.items():
            kernel = functools.partial(_compute, get_kernel(f"aten::{name}", "CPU"), name, first)
            library.impl(name, kernel, "CPU", with_keyset=True)
    return library


def _compute(original: Any, name: str, first: int, keys: Any, *arguments: Any, **options: Any) -> Any:
    """Computes one of torch's products by the first way that takes it, or as torch does."""
    call = functools.partial(original.call_boxed, keys)
    for way in _ways:
        if way.takes(name, arguments[first], arguments[first + 1]):
            return way.compute(call, name, *arguments, **options)
    return call(*arguments, **options)
