"""The attention kernels agree with the definition, and with each other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from forge_plugin_transformer.attention_backends import Choice
from forge_plugin_transformer.document_backends import DocumentChoice
from forge_plugin_transformer.modules import attention_core
from forge_plugin_transformer.modules import gemm_attention as gemm_module
from forge_plugin_transformer.modules.attention_core import AttentionCore, torch_attention
from forge_plugin_transformer.modules.documents import document_mask
from forge_plugin_transformer.modules.gemm_attention import gemm_attention
from forge_plugin_transformer.modules.softmax_attention import one_query_attention
from forge_testing.refusals import naming

CPU_KERNELS = ("torch", "flash", "math", "gemm")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, the last one short, in few positions."""
    monkeypatch.setattr(gemm_module, "BLOCK", 8)


def inputs(dtype: torch.dtype = torch.float64, batch: int = 2, values: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """6 query heads in 2 groups, of width 4, over 21 positions."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, 21, heads, width) for heads, width in ((6, 4), (2, 4), (2, values))]
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=generator) * 2 for shape in shapes)
    return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(), v.to(dtype).requires_grad_()


def definition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Query by query, head by head."""
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    for b, i, h in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        group = h // (q.shape[2] // k.shape[2])
        scores = k[b, :, group] @ q[b, i, h] / math.sqrt(q.shape[3])
        out[b, i, h] = torch.softmax(scores.masked_fill(~mask[b, 0, i], -torch.inf), 0) @ v[b, :, group]
    return out


def documents(batch: int = 2, length: int = 21) -> Tensor:
    return torch.arange(length).expand(batch, -1) // torch.tensor([[5], [9]])


MASKS = {
    "causal": (None, torch.ones(21, 21, dtype=torch.bool).tril().expand(2, 1, -1, -1)),
    "documents": (document_mask(documents()),) * 2,
}


def core(kernel: str) -> AttentionCore:
    return AttentionCore(Choice(kernel, ""), DocumentChoice("mask", ""))


@pytest.mark.parametrize("values", [4, 3], ids=["", "narrow values"])
@pytest.mark.parametrize("masking", MASKS)
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_forward_and_backward_equal_the_definition(kernel: str, masking: str, values: int) -> None:
    tensors, grad = inputs(values=values), torch.randn(2, 21, 6, values, dtype=torch.float64)
    expected = definition(*tensors, MASKS[masking][1])
    out = core(kernel)(*tensors, {} if masking == "causal" else {"document_ids": documents()})
    torch.testing.assert_close(out, expected)
    expected_grads = torch.autograd.grad(expected, tensors, grad)
    torch.testing.assert_close(torch.autograd.grad(out, tensors, grad), expected_grads)


@pytest.mark.parametrize("masking", MASKS)
@pytest.mark.parametrize("keep_up_to", [0, 21], ids=["recomputed", "kept"])
def test_gemm_gradients_equal_numerical_ones(monkeypatch: pytest.MonkeyPatch, keep_up_to: int, masking: str) -> None:
    monkeypatch.setattr(gemm_module, "KEEP_UP_TO", keep_up_to)
    assert torch.autograd.gradcheck(lambda *t: gemm_attention(*t, MASKS[masking][0]), inputs(), fast_mode=True)


def test_gemm_keeps_probabilities_of_the_lower_blocks_only() -> None:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        gemm_attention(*inputs(), None)
    rows_and_keys = 8 * 8 + 8 * 16 + 5 * 21
    assert max(tensor.numel() for tensor in saved) == 2 * 6 * rows_and_keys


@pytest.mark.parametrize(("keep_up_to", "softmaxes"), [(20, 6), (21, 3)], ids=["recomputed", "kept"])
def test_gemm_computes_longer_sequences_again(monkeypatch: pytest.MonkeyPatch, keep_up_to: int, softmaxes: int) -> None:
    blocks, original = [], gemm_module._probabilities
    monkeypatch.setattr(gemm_module, "_probabilities", lambda *a: (blocks.append(a), original(*a))[1])
    monkeypatch.setattr(gemm_module, "KEEP_UP_TO", keep_up_to)
    gemm_attention(*inputs(), None).sum().backward()
    assert len(blocks) == softmaxes


def test_gemm_keeps_nothing_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    monkeypatch.setattr(gemm_module, "kept_size", lambda q, k: kept.append(q))
    with torch.no_grad():
        gemm_attention(*inputs(), None)
    assert not kept


@pytest.mark.parametrize("values", [4, 3], ids=["", "narrow values"])
@pytest.mark.parametrize("masking", MASKS)
def test_gemm_operators_are_what_they_declare(masking: str, values: int) -> None:
    torch.library.opcheck(gemm_module._attend, (*inputs(torch.float32, values=values), MASKS[masking][0], True))


@pytest.mark.parametrize("kernel", ["torch", "flash"])
def test_values_wider_than_keys_are_refused(kernel: str) -> None:
    with pytest.raises(ValueError, match=naming("5 wide", "keys 4")):
        core(kernel)(*inputs(values=5), {})


def test_narrow_values_are_not_left_to_the_slow_kernel() -> None:
    """It is torch's only one for them on a CPU, so they are padded."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert core("torch")(*inputs(values=3), {}).shape == (2, 21, 6, 3)


def test_gemm_in_bf16_is_as_close_to_the_truth_as_flash_at_scores_of_unit_variance() -> None:
    """Larger scores cost it more, since it rounds them before the softmax."""
    generator = torch.Generator().manual_seed(0)
    low = [torch.randn(2, 200, heads, 32, generator=generator).bfloat16() for heads in (8, 4, 4)]
    grad = torch.randn(2, 200, 8, 32, generator=generator)

    def results(kernel: str, dtype: torch.dtype) -> Tensor:
        tensors = [tensor.to(dtype).requires_grad_() for tensor in low]
        out = core(kernel)(*tensors, {})
        grads = torch.autograd.grad(out, tensors, grad.to(dtype))
        return torch.cat([tensor.double().flatten() for tensor in (out, *grads)])

    truth = results("math", torch.float64)
    flash, gemm = ((results(kernel, torch.bfloat16) - truth).norm() for kernel in ("flash", "gemm"))
    assert gemm < 1.25 * flash


def test_a_compiled_graph_is_not_broken() -> None:
    plain, tensors = core("gemm"), inputs(torch.float32)
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    results = [attend(*tensors, {}) for attend in (plain, compiled)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), tensors) for out in results))


def test_the_flash_kernel_on_cuda_refuses_a_mask():
    with FakeTensorMode():
        q, k, v, mask = (torch.empty(1, 4, 2, 8, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    with pytest.raises(ValueError, match=naming("document_ids", "cuda", "attention.backend")):
        torch_attention(q, k, v, mask, "flash")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_query_of_shared_keys_takes_two_products_where_scores_keep_their_digits(monkeypatch, dtype):
    """On CPUs, where they are faster than torch's kernels; those do not round scores to 16 bits."""
    calls = []

    def recorded(*arguments):
        calls.append(arguments)
        return one_query_attention(*arguments)

    monkeypatch.setattr(attention_core, "one_query_attention", recorded)
    q, k, v = (torch.randn(2, n, heads, 8, dtype=dtype) for n, heads in ((1, 4), (5, 2), (5, 2)))
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    found = torch_attention(q, k, v, mask)
    assert len(calls) == (dtype.itemsize >= 4)
    expected = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), mask, enable_gqa=True)
    torch.testing.assert_close(found, expected.transpose(1, 2))
