"""Everything private to torch that attention uses, beside `forge_kit.torch_internals`.

`tests/test_torch_internals.py` names what another torch has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

from forge_core.contracts.model import Model

softmax_backward_data = torch._softmax_backward_data
"""The gradient of a softmax, in place with `grad_input`; publicly it takes more passes, and memory for each."""


class KeepsTies(Model):
    """A model that ties parameters again whenever torch has replaced them.

    `to_empty`, `to` and similar make a new parameter for each module that holds one, by `nn.Module._apply`, and have no
    hook that runs afterwards.
    """

    def tie(self) -> None:
        """Let modules share the parameters that they have in common."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tie()
        return self
