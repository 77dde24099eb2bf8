"""Norms and feed-forward parts against their definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import Gemma3TextConfig
from transformers.activations import XIELUActivation
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm, Gemma3TextScaledWordEmbedding
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from forge_plugin_transformer import GEGLU, GELU, XIELU, InitStd, LayerNorm, RMSNorm, SquaredReLU, SwiGLU
from forge_plugin_transformer.modules.ends import ScaledEmbedding

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 1, 12), (3, 1, 2, 12)])
def test_rms_norm_of_a_generated_token_equals_that_of_training(
    make_part: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    norm = randomise(make_part(RMSNorm(eps=1e-2), dim=12))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    with torch.no_grad():
        generated = norm(x)
    assert generated.dtype == dtype
    torch.testing.assert_close(generated, norm(x).detach(), atol=1e-6 if dtype == torch.float32 else 1e-2, rtol=1e-5)


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


def test_a_layer_norm_with_an_offset_is_that_of_nemotron(make_part: Callable[..., Any]) -> None:
    norm = make_part(LayerNorm(offset=1), dim=12, dtype=torch.float64)
    x = torch.randn(4, 12, dtype=torch.float64)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (12,)))  # at first
    theirs = NemotronLayerNorm1P(12).double()
    theirs.load_state_dict(randomise(norm).state_dict())
    torch.testing.assert_close(norm(x), theirs(x), rtol=0, atol=1e-15)


def test_squared_relu_equals_its_definition(make_part: Callable[..., Any]) -> None:
    ffn = randomise(make_part(SquaredReLU(bias=True), dim=12, init=INIT, dtype=torch.float64))
    assert ffn.up.weight.shape == (48, 12)
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    hidden = (x @ ffn.up.weight.mT + ffn.up.bias).clamp(min=0) ** 2
    torch.testing.assert_close(ffn(x, {}), hidden @ ffn.down.weight.mT + ffn.down.bias)


def test_xielu_is_that_of_transformers(make_part: Callable[..., Any]) -> None:
    ffn = make_part(XIELU(hidden=20), dim=12, init=INIT, dtype=torch.float64)
    theirs = XIELUActivation(dtype=torch.float64)
    x = torch.randn(3, 40, dtype=torch.float64) * 3
    torch.testing.assert_close(ffn.act(x), theirs(x), rtol=0, atol=1e-14)  # at first
    ffn.act.alpha_p.data.fill_(-0.4)
    ffn.act.alpha_n.data.fill_(0.9)
    assert not theirs.load_state_dict(ffn.act.state_dict()).missing_keys
    x[0, :3] = torch.tensor([0.0, -1e-7, -1e-3])
    torch.testing.assert_close(ffn.act(x), theirs(x), rtol=0, atol=1e-14)
    up = x[:, :12] @ ffn.up.weight.mT
    torch.testing.assert_close(ffn(x[None, :, :12], {}), (theirs(up) @ ffn.down.weight.mT)[None])
    assert torch.autograd.gradcheck(lambda x, *_: ffn.act(x), (x[1:].clone().requires_grad_(), *ffn.act.parameters()))


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


# --- of Gemma --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_with_an_offset_equals_gemmas(make_part: Callable[..., Any], dtype: torch.dtype) -> None:
    norm, reference = make_part(RMSNorm(eps=1e-6, offset=1), dim=64), Gemma3RMSNorm(64)
    assert torch.equal(norm.weight, reference.weight)
    weight = torch.randn(64, generator=torch.Generator().manual_seed(2)).to(dtype)
    norm.weight.data.copy_(weight)
    reference.weight.data = weight
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    digits = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 0.0}
    torch.testing.assert_close(norm(x), reference(x), **digits)


def test_gradients_of_rms_norm_with_an_offset_equal_numerical_ones(make_part: Callable[..., Any]) -> None:
    norm = randomise(make_part(RMSNorm(offset=1), dim=6, dtype=torch.float64))
    x = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, _: norm(x), (x, norm.weight))


def test_geglu_equals_gemmas(make_part: Callable[..., Any]) -> None:
    config = Gemma3TextConfig(hidden_size=16, intermediate_size=20, hidden_activation="gelu_pytorch_tanh")
    ffn, reference = randomise(make_part(GEGLU(hidden=20), dim=16, init=INIT)), Gemma3MLP(config)
    reference.load_state_dict({name.replace(".", "_proj."): tensor for name, tensor in ffn.state_dict().items()})
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(ffn(x, {}), reference(x))


def test_geglu_may_be_exact(make_part: Callable[..., Any]) -> None:
    ffn = randomise(make_part(GEGLU(hidden=20, approximate="none", bias=True), dim=12, init=INIT, dtype=torch.float64))
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    gate, up = (F.linear(x, part.weight, part.bias) for part in (ffn.gate, ffn.up))
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1)
    torch.testing.assert_close(ffn(x, {}), F.linear(gate * normal.cdf(gate) * up, ffn.down.weight, ffn.down.bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scaled_embedding_equals_gemmas_to_the_bit(dtype: torch.dtype) -> None:
    embedding = ScaledEmbedding(11, 48, scale=48**0.5, dtype=dtype, std=1.0)
    reference = Gemma3TextScaledWordEmbedding(11, 48, None, 48**0.5).to(dtype)
    reference.embed_scale = torch.tensor(48**0.5)
    embedding.weight.data.copy_(reference.weight)
    assert torch.equal(embedding(torch.arange(11)), reference(torch.arange(11)))
