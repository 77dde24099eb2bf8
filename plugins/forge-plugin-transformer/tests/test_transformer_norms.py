"""Norms and feed-forward parts against their definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from forge_plugin_transformer import GELU, InitStd, LayerNorm, RMSNorm, SwiGLU

INIT = InitStd(0.3, 0.1)


def randomise(module: torch.nn.Module) -> Any:
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return module


def test_rms_norm_and_its_gradients_equal_torch(make_part: Callable[..., Any]) -> None:
    norm = randomise(make_part(RMSNorm(eps=1e-2), dim=12, dtype=torch.float64))
    x, grad = torch.randn(2, 2, 5, 12, dtype=torch.float64)
    x.requires_grad_()
    out, expected = norm(x), F.rms_norm(x, (12,), norm.weight, 1e-2)
    torch.testing.assert_close(out, expected)
    inputs = (x, norm.weight)
    torch.testing.assert_close(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad))


def test_rms_norm_gradients_equal_numerical_ones(make_part: Callable[..., Any]) -> None:
    norm = randomise(make_part(RMSNorm(), dim=6, dtype=torch.float64))
    x = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, _: norm(x), (x, norm.weight))


def test_rms_norm_of_a_frozen_gain_has_a_gradient_in_x(make_part: Callable[..., Any]) -> None:
    norm = make_part(RMSNorm(), dim=6).requires_grad_(False)
    x = torch.randn(3, 6, requires_grad=True)
    norm(x).square().sum().backward()
    assert x.grad is not None


def test_layer_norm_equals_its_definition(make_part: Callable[..., Any]) -> None:
    norm = randomise(make_part(LayerNorm(eps=1e-2), dim=12, dtype=torch.float64))
    x = torch.randn(4, 12, dtype=torch.float64)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-2).sqrt() * norm.weight + norm.bias
    torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize("component", [RMSNorm(), LayerNorm()], ids=["rmsnorm", "layernorm"])
def test_norms_of_bf16_compute_in_float32(make_part: Callable[..., Any], component: Any) -> None:
    norm = make_part(component, dim=256)
    x = (torch.randn(64, 256) + 3).bfloat16()
    assert norm(x).dtype == torch.bfloat16
    assert (norm(x) != norm(x.float()).bfloat16()).float().mean() < 1e-3


def test_swiglu_equals_its_definition(make_part: Callable[..., Any]) -> None:
    ffn = randomise(make_part(SwiGLU(hidden=20, bias=True), dim=12, init=INIT, dtype=torch.float64))
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    gate, up = (F.linear(x, part.weight, part.bias) for part in (ffn.gate, ffn.up))
    torch.testing.assert_close(ffn(x, {}), F.linear(gate * torch.sigmoid(gate) * up, ffn.down.weight, ffn.down.bias))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_equals_its_definition(make_part: Callable[..., Any], approximate: str) -> None:
    ffn = randomise(make_part(GELU(approximate=approximate), dim=6, init=INIT, dtype=torch.float64))
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    expected = F.gelu(x @ ffn.up.weight.mT, approximate=approximate) @ ffn.down.weight.mT
    torch.testing.assert_close(ffn(x, {}), expected)


@pytest.mark.parametrize(("dim", "hidden"), [(256, 768), (768, 2048), (4096, 11008)])
def test_hidden_width_of_swiglu_follows_dim(make_part: Callable[..., Any], dim: int, hidden: int) -> None:
    with torch.device("meta"):
        module = SwiGLU().build(None, dim=dim, init=INIT)
    assert module.up.out_features == hidden
