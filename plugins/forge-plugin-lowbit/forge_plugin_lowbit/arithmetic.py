"""AdamW by torchao, and the parts of torchao that this plugin uses."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silences torchao, which when imported warns of each of its kernels for devices other than this machine's."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


with _without_warnings():
    from torchao.optim import quant_utils, subclass_4bit, subclass_8bit, subclass_fp8
    from torchao.optim.adam import single_param_adam

__all__ = ["adamw", "quant_utils", "subclass_4bit", "subclass_8bit", "subclass_fp8"]


def adamw(
    parameter: Tensor,
    gradient: Tensor,
    step: Tensor,
    average: Tensor,
    square: Tensor,
    lr: Tensor,
    weight_decay: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Torchao's AdamW, in place and in float32.

    Args:
        parameter: weights, of any shape.
        gradient: like `parameter`.
        step: (), number of the update, from 1.
        average: average of the gradient.
        square: average of its square.
        lr: (), float32.
        weight_decay: (), float32.
        beta1: decay of `average`.
        beta2: decay of `square`.
        eps: added to the root of `square`.
    """
    # No AMSGrad (None), decoupled weight decay (True), and no stochastic rounding by torchao (False), whose random bits
    # would depend on the layout
    single_param_adam(
        parameter, gradient, step, average, square, None, lr, beta1, beta2, weight_decay, eps, True, False
    )
