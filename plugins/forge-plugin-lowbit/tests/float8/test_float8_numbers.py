"""What a linear layer computes in float8: torchao's numbers, the formula's, and under tensor parallel the whole's."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import forge_plugin_lowbit.float8.product
from forge_kit.nn.modules import Linear, MatrixShard
from forge_plugin_lowbit.float8.product import multiply_in_float8
from forge_testing.processes import run_on_ranks

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
INPUTS, OUTPUTS = 64, 32


def config(recipe):
    found = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(found, "emulate", True)
    return found


def tensors(dtype=torch.float32, scale=1.0):
    """Input (2, 16, inputs), weight, bias, and a gradient of the output; with outliers, so that scales differ."""
    torch.manual_seed(0)
    x, grad = torch.randn(2, 16, INPUTS), torch.randn(2, 16, OUTPUTS)
    weight, bias = torch.randn(OUTPUTS, INPUTS) / 8, torch.randn(OUTPUTS)
    for number, tensor in enumerate((x.view(32, -1), grad.view(32, -1), weight)):
        tensor[3 + number, 5] *= 40 * scale
        tensor[-4 - number, -6] *= 15 * scale
    return [tensor.to(dtype) for tensor in (x, weight, bias, grad)]


def through(module, x, grad):
    """Output, and the gradients of input, weight and bias."""
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(grad)
    return [y.detach(), x.grad, module.weight.grad, module.bias.grad]


def ours(recipe, weight, bias, kind=Linear):
    module = kind(weight.shape[1], weight.shape[0], bias=True)
    with torch.no_grad():
        module.weight.copy_(weight)
        module.bias.copy_(bias)
    multiply_in_float8(module, config(recipe))
    return module


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [Linear, nn.Linear])
def test_numbers_are_those_of_torchao_to_the_bit(recipe, kind):
    x, weight, bias, grad = tensors()
    plain = nn.Linear(INPUTS, OUTPUTS)
    with torch.no_grad():
        plain.weight.copy_(weight)
        plain.bias.copy_(bias)
    expected = through(convert_to_float8_training(nn.Sequential(plain), config=config(recipe))[0], x, grad)
    found = through(ours(recipe, weight, bias, kind), x, grad)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.allclose(found[0], x @ weight.T + bias, rtol=1e-4), "something was rounded"


def test_weights_are_cast_to_the_compute_precision_first():
    """As fsdp gathers them, so that the layout does not matter."""
    x, weight, bias, grad = tensors(torch.bfloat16)
    plain = nn.Linear(INPUTS, OUTPUTS, dtype=torch.bfloat16)
    with torch.no_grad():
        plain.weight.copy_(weight)
        plain.bias.copy_(bias)
    expected = through(convert_to_float8_training(nn.Sequential(plain), config=config("rowwise"))[0], x, grad)
    found = through(ours("rowwise", weight.float() * (1 + 1e-4), bias.float()), x, grad)
    assert found[0].dtype == torch.bfloat16
    assert found[2].dtype == torch.float32
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2].bfloat16(), expected[2])


def test_tensorwise_is_its_formula():
    """Each operand is multiplied by a power of nothing, largest representable / largest seen, rounded, and divided."""

    def rounded(tensor, dtype=torch.float8_e4m3fn):
        scale = (torch.finfo(dtype).max / tensor.abs().max().double()).float()
        return (tensor * scale).to(dtype).float() / scale

    x, weight, bias, grad = tensors()
    found = through(ours("tensorwise", weight, bias), x, grad)
    x8, w8, g8 = rounded(x), rounded(weight), rounded(grad, torch.float8_e5m2)
    expected = [
        x8 @ w8.T + bias,
        g8 @ w8,
        g8.flatten(0, 1).T @ x8.flatten(0, 1),
        grad.sum((0, 1)),
    ]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# --- tensor parallel ---------------------------------------------------------------------------------------------


def parts(recipe, way, rank):
    """A rank's share of the layer, put together to the whole: output, gradients of input and weight."""
    x, weight, _, grad = tensors()
    module = Linear(INPUTS, OUTPUTS)
    own = weight.chunk(2, int(way == "row"))[rank]
    module.weight = nn.Parameter(own.clone())
    module.matrix_shard = MatrixShard(dist.group.WORLD, int(way == "row"))
    multiply_in_float8(module, config(recipe))
    x = (x.chunk(2, -1)[rank] if way == "row" else x).clone().requires_grad_()
    y = module(x)
    y.backward(grad.chunk(2, -1)[rank] if way == "column" else grad)
    return y.detach(), x.grad, module.weight.grad


def whole(recipe, way, ranks):
    outputs, inputs, weights = zip(*ranks, strict=True)
    if way == "column":
        return torch.cat(outputs, -1), sum(inputs), torch.cat(weights, 0)
    return sum(outputs), torch.cat(inputs, -1), torch.cat(weights, 1)


@pytest.fixture(scope="module")
def shares():
    """What two ranks found, for each recipe and way, with scales of the whole and with scales of their own."""
    cases = [(recipe, way) for recipe in RECIPES for way in ("column", "row")]

    def run(rank):
        agreed = {case: parts(*case, rank) for case in cases}
        with mock.patch.object(forge_plugin_lowbit.float8.product, "_largest", lambda amax, groups: amax):
            return agreed, {case: parts(*case, rank) for case in cases}

    ranks = run_on_ranks(2, run)
    return [{case: whole(*case, [rank[kind][case] for rank in ranks]) for case in cases} for kind in (0, 1)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", ["column", "row"])
def test_a_split_layer_has_the_numbers_of_the_whole_one(shares, recipe, way):
    x, weight, bias, grad = tensors()
    output, *gradients = through(ours(recipe, weight, torch.zeros_like(bias)), x, grad)[:3]
    for found, expected in zip(shares[0][recipe, way], (output, *gradients), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["column", "row"])
def test_it_would_not_if_each_rank_took_scales_of_its_own(shares, way):
    x, weight, bias, grad = tensors()
    expected = through(ours("tensorwise", weight, torch.zeros_like(bias)), x, grad)[:3]
    found = shares[1]["tensorwise", way]
    assert any((a - b).abs().max() > 1e-2 for a, b in zip(found, expected, strict=True))


def test_what_needs_no_gradient_gets_none():
    x, weight, bias, grad = tensors()
    module = ours("tensorwise", weight, bias)
    module.weight.requires_grad_(False)
    y = module(x.requires_grad_())
    y.backward(grad)
    assert module.weight.grad is None
    assert x.grad is not None
