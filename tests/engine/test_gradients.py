"""The global norm of the gradient, and clipping by it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from forge_core.engine.step import clip, global_norm


def with_gradients(*values: float, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters whose gradients, put together, are these values."""
    parameters = [nn.Parameter(torch.zeros(1, dtype=dtype)) for _ in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor([value], dtype=dtype)
    return parameters


def clipped(parameters: list[nn.Parameter], max_norm: float) -> list[float]:
    clip(parameters, global_norm(parameters), max_norm)
    return [parameter.grad.item() for parameter in parameters]


def test_the_norm_is_over_all_parameters_that_have_a_gradient():
    assert global_norm([*with_gradients(3.0, 4.0), nn.Parameter(torch.zeros(2))]).item() == 5.0


def test_narrow_gradients_are_summed_in_float32():
    assert global_norm(with_gradients(*[1.0] * 1000, dtype=torch.bfloat16)).item() == pytest.approx(math.sqrt(1000))


def test_gradients_beyond_the_limit_are_scaled_to_it():
    assert clipped(with_gradients(3.0, 4.0), 0.5) == pytest.approx([0.3, 0.4])


@pytest.mark.parametrize("values", [(0.003, 0.004), (0.3, 0.4), (0.0, 0.0)])
def test_gradients_within_the_limit_stay_as_they_are(values):
    parameters = with_gradients(*values)
    before = [parameter.grad.clone() for parameter in parameters]
    clip(parameters, global_norm(parameters), 0.5)
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(parameters, before, strict=True))


def test_gradients_whose_norm_is_not_a_number_are_left_to_the_policy():
    first, second = clipped(with_gradients(1.0, math.nan), 0.5)
    assert first == 1.0
    assert math.isnan(second)


@pytest.mark.parametrize("values", [(1.0, math.inf), (1.0, -math.inf), (3e38, 3e38)])
def test_an_infinite_norm_clips_as_torch_does(values):
    reference = with_gradients(*values)
    nn.utils.clip_grad_norm_(reference, 0.5)
    assert clipped(with_gradients(*values), 0.5) == pytest.approx([p.grad.item() for p in reference], nan_ok=True)
