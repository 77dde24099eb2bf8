"""An embedding's gradient counts every token, in 16 bits too; a head's logits are the same by each of its products."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from forge_kit.nn import modules
from forge_kit.nn.modules import Embedding, LinearHead
from forge_testing.processes import run_on_ranks

VOCABULARY, DIM, TOKENS = 16, 4, 2048


def ids_of(rank):
    """Half of all tokens are one, as frequent ones are; the others are drawn."""
    ids = torch.randint(VOCABULARY, (2, TOKENS // 2), generator=torch.Generator().manual_seed(rank))
    ids[0] = 3
    return ids


def gradient_of(rank):
    return torch.rand(2, TOKENS // 2, DIM, generator=torch.Generator().manual_seed(10 + rank)).bfloat16()


def exact(rank):
    total = torch.zeros(VOCABULARY, DIM, dtype=torch.float64)
    return total.index_add_(0, ids_of(rank).flatten(), gradient_of(rank).flatten(0, 1).double())


def embedding(dtype=torch.float32):
    module = Embedding(VOCABULARY, DIM, dtype=torch.bfloat16)
    torch.nn.init.ones_(module.weight)
    return module.to(dtype)


def test_the_gradient_of_weights_in_16_bits_is_exact_and_rounded_once():
    module = embedding(torch.bfloat16)
    module(ids_of(0)).backward(gradient_of(0))
    torch.testing.assert_close(module.weight.grad, exact(0).bfloat16(), rtol=2**-8, atol=0)


def test_no_token_has_no_gradient():
    module = embedding(torch.bfloat16)
    module(torch.zeros(2, 0, dtype=torch.int64)).sum().backward()
    assert not module.weight.grad.any()


def sharded(rank):
    module = embedding()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    module(ids_of(rank)).backward(gradient_of(rank))
    return module.weight.grad.full_tensor()


def test_ranks_that_gather_weights_in_16_bits_have_the_gradient_of_one_process():
    module = embedding()
    for rank in range(2):
        module(ids_of(rank)).backward(gradient_of(rank))
    for gradient in run_on_ranks(2, sharded):
        torch.testing.assert_close(gradient, module.weight.grad, rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_weights_are_left_to_torch(dtype):
    module = embedding(dtype)
    module(ids_of(0)).backward(gradient_of(0))
    assert module.weight.grad.dtype == dtype
    torch.testing.assert_close(module.weight.grad.double(), exact(0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (5, 1), (2, 3), (8,), (9,)])
def test_logits_of_few_rows_are_those_of_many(bias, shape, monkeypatch):
    head = LinearHead(DIM, VOCABULARY, bias=bias)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(*shape, DIM)
    expected = head(x)
    assert expected.requires_grad
    monkeypatch.setattr(modules, "LARGE_TABLE", 1)
    with torch.no_grad():
        torch.testing.assert_close(head(x), expected, rtol=1e-5, atol=1e-6)
        # The table comes first where there are 2 to 8 rows: the logits of a token then lie side by side
        assert bias or head(x).is_contiguous() == (shape in [(1,), (9,)])
