"""Attention within documents: every way gives what each document gives alone, and nothing crosses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge_plugin_transformer.attention_backends import Choice
from forge_plugin_transformer.document_backends import DocumentChoice
from forge_plugin_transformer.modules import (
    attention_core,
    documents,
    gemm_attention,
    segment_attention,
    varlen_attention,
)
from forge_plugin_transformer.modules.attention_core import AttentionCore, torch_attention

WAYS = [("flash", "mask"), ("flash", "segments"), ("gemm", "mask"), ("gemm", "segments"), ("torch", "segments")]
LENGTHS = [[21], [5, 16], [1, 1, 3, 8, 8], [8] * 2 + [5], [1] * 21, [12, 1, 8]]


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few positions make several blocks, and only short documents go together."""
    monkeypatch.setattr(gemm_attention, "BLOCK", 8)
    monkeypatch.setattr(segment_attention, "TOGETHER", 6)


def numbered(*rows: list[int]) -> Tensor:
    """(B, S) ids of documents of these lengths, counted afresh in each row."""
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])


def inputs(rows: int, length: int, dtype: torch.dtype = torch.float64, values: int = 4) -> list[Tensor]:
    """6 query heads in 2 groups, of width 4."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, length, heads, width) for heads, width in ((6, 4), (2, 4), (2, values))]
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for s in shapes]


def core(kernel: str, way: str) -> AttentionCore:
    return AttentionCore(Choice(kernel, ""), DocumentChoice(way, ""))


def alone(tensors: list[Tensor], rows: list[list[int]]) -> Tensor:
    """Each document by itself."""
    out = torch.empty(*tensors[0].shape[:3], tensors[2].shape[3], dtype=tensors[0].dtype)
    for row, lengths in enumerate(rows):
        pieces = [tensor[row].split(lengths) for tensor in tensors]
        parts = [[part[None] for part in piece] for piece in zip(*pieces, strict=True)]
        out[row] = torch.cat([torch_attention(*part, None, "math")[0] for part in parts])
    return out


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("kernel", "way"), WAYS)
def test_forward_and_backward_equal_those_of_each_document_alone(kernel: str, way: str, lengths: list[int]) -> None:
    rows = [lengths, lengths[::-1]]
    tensors, grad = inputs(2, 21), torch.randn(2, 21, 6, 4, dtype=torch.float64)
    out, expected = core(kernel, way)(*tensors, {"document_ids": numbered(*rows)}), alone(tensors, rows)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out, tensors, grad), torch.autograd.grad(expected, tensors, grad))


@pytest.mark.parametrize(("kernel", "way"), WAYS)
def test_values_may_be_narrower_than_keys(kernel: str, way: str) -> None:
    rows = [[5, 16], [12, 1, 8]]
    tensors, grad = inputs(2, 21, values=3), torch.randn(2, 21, 6, 3, dtype=torch.float64)
    out, expected = core(kernel, way)(*tensors, {"document_ids": numbered(*rows)}), alone(tensors, rows)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out, tensors, grad), torch.autograd.grad(expected, tensors, grad))


@pytest.mark.parametrize(("kernel", "way"), WAYS)
def test_rows_shorter_than_a_segment_equal_their_documents_alone(kernel: str, way: str) -> None:
    rows = [[2], [1, 1], [2]]
    tensors, grad = inputs(3, 2), torch.randn(3, 2, 6, 4, dtype=torch.float64)
    out, expected = core(kernel, way)(*tensors, {"document_ids": numbered(*rows)}), alone(tensors, rows)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out, tensors, grad), torch.autograd.grad(expected, tensors, grad))


@pytest.mark.parametrize(("kernel", "way"), WAYS)
def test_a_document_gets_no_gradient_from_another(kernel: str, way: str) -> None:
    tensors = inputs(1, 21)
    out = core(kernel, way)(*tensors, {"document_ids": numbered([3, 4, 9, 5])})
    for grad in torch.autograd.grad(out[:, 7:16].sum(), tensors):
        assert grad[:, 7:16].abs().sum() > 0
        assert not grad[:, :7].any()
        assert not grad[:, 16:].any()


@pytest.mark.parametrize(("kernel", "way"), WAYS)
def test_an_id_that_comes_back_is_another_document(kernel: str, way: str) -> None:
    tensors, attend = inputs(1, 12), core(kernel, way)
    again, other = (torch.tensor([[0] * 4 + [1] * 4 + [last] * 4]) for last in (0, 2))
    assert torch.equal(attend(*tensors, {"document_ids": again}), attend(*tensors, {"document_ids": other}))


@pytest.mark.parametrize("keep_up_to", [0, 8, 21])
def test_gemm_segments_are_kept_or_computed_again(monkeypatch: pytest.MonkeyPatch, keep_up_to: int) -> None:
    monkeypatch.setattr(gemm_attention, "KEEP_UP_TO", keep_up_to)
    ids = numbered([13, 3, 2, 3])
    assert torch.autograd.gradcheck(
        lambda *tensors: segment_attention.segment_attention(*tensors, ids, "gemm"), inputs(1, 21), fast_mode=True
    )


@pytest.mark.parametrize(("kernel", "values"), [("flash", 4), ("gemm", 4), ("gemm", 3)])
def test_segment_operators_are_what_they_declare(monkeypatch: pytest.MonkeyPatch, kernel: str, values: int) -> None:
    monkeypatch.setattr(gemm_attention, "BLOCK", 32)  # so that what is kept fills the room that there is for it
    arguments = (*inputs(2, 21, torch.float32, values), numbered([21], [21]), kernel, True)
    torch.library.opcheck(segment_attention._attend, arguments)


@pytest.mark.parametrize(("kernel", "way"), WAYS)
def test_a_compiled_graph_is_not_broken_and_serves_every_division(kernel: str, way: str) -> None:
    torch._dynamo.reset()
    plain, tensors = core(kernel, way), inputs(2, 21, torch.float32)
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (([5, 16], [21]), ([1, 2, 18], [7, 7, 7])):
            batch = plain.prepare({"document_ids": numbered(*rows)})
            results = [attend(*tensors, batch) for attend in (plain, compiled)]
            torch.testing.assert_close(*results)
            torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), tensors) for out in results))


def test_half_precision_is_as_close_to_the_truth_as_with_a_mask() -> None:
    ids, low = numbered([100, 60, 40]), inputs(1, 200, torch.bfloat16)
    truth = core("math", "mask")(*(tensor.double() for tensor in low), {"document_ids": ids})
    errors = {
        way: (core("flash", way)(*low, {"document_ids": ids}).double() - truth).norm() for way in ("mask", "segments")
    }
    assert errors["segments"] < 1.1 * errors["mask"]


# --- what is made of the ids -----------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=9), min_size=1, max_size=3))
@settings(deadline=None)
def test_segments_cover_every_position_once_and_no_document_is_divided(rows: list[list[int]]) -> None:
    longest = max(map(sum, rows))
    rows = [[*row, *[longest - sum(row)] * (sum(row) < longest)] for row in rows]
    ids = numbered(*rows)
    found = list(segment_attention.segments(ids))
    bounds = [(segment.positions.start, segment.positions.stop) for segment in found]
    assert [position for start, stop in bounds for position in range(start, stop)] == list(range(ids.numel()))
    begins = documents.document_starts(ids).flatten().tolist()
    assert all(begins[segment.positions.start] for segment in found)
    for segment in found:
        inside, size = sum(begins[segment.positions]), segment.positions.stop - segment.positions.start
        assert (segment.mask is None) == (inside == 1)
        assert inside == 1 or size <= segment_attention.TOGETHER


def test_bounds_are_those_of_all_rows_and_repeat_the_end() -> None:
    bounds = documents.document_bounds(numbered([5, 16], [21], [1, 20]))
    assert bounds.dtype == torch.int32
    assert bounds.tolist() == [0, 5, 21, 42, 43] + [63] * 11
    assert len(documents.document_bounds(torch.arange(15)[None])) == 16
    assert len(documents.document_bounds(torch.arange(16)[None])) == 32


def test_what_is_prepared_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []
    make = attention_core.Prepared("document_mask", lambda ids: (made.append(ids), documents.document_mask(ids))[1])
    monkeypatch.setattr(attention_core, "PREPARED", {"mask": make})
    attend, tensors, batch = core("flash", "mask"), inputs(1, 21), {"document_ids": numbered([5, 16])}
    ready = attend.prepare(batch)
    assert set(batch) == {"document_ids"}
    for _ in range(3):
        attend(*tensors, ready)
    assert attend.prepare(ready) is ready
    assert len(made) == 1
    assert core("flash", "mask").prepare({}) == {}


# --- varlen ----------------------------------------------------------------------------------------------------------


def reference_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *, window_size: tuple[int, int]
) -> Tensor:
    """What `torch.nn.attention.varlen.varlen_attn` promises: (T, heads, E), bounds of sequences, a window."""
    assert cu_q.dtype == torch.int32
    assert q.shape == k.shape == v.shape
    assert window_size == (-1, 0)
    out = torch.empty_like(q)
    assert torch.equal(cu_q, cu_k)
    for start, stop in cu_q.unfold(0, 2, 1).tolist():
        assert stop - start <= max_q == max_k
        if stop > start:
            out[start:stop] = torch_attention(*(t[None, start:stop] for t in (q, k, v)), None, "math")[0]
    return out


@pytest.mark.parametrize("values", [4, 3], ids=["", "narrow values"])
def test_varlen_hands_over_what_the_kernel_wants(monkeypatch: pytest.MonkeyPatch, values: int) -> None:
    monkeypatch.setattr(varlen_attention, "varlen_attn", reference_varlen)
    tensors, batch = inputs(2, 21, values=values), {"document_ids": numbered([5, 16], [1, 8, 12])}
    torch.testing.assert_close(core("flash", "varlen")(*tensors, batch), core("math", "mask")(*tensors, batch))


def test_varlen_of_this_torch_takes_the_call_forward_and_backward() -> None:
    """Without a device: shapes and arguments only."""
    tensors = [tensor.detach().bfloat16().to("meta").requires_grad_() for tensor in inputs(2, 21)]
    bounds = torch.empty(16, dtype=torch.int32, device="meta")
    batch = {"document_ids": torch.empty(2, 21, device="meta"), "document_bounds": bounds}
    out = core("flash", "varlen")(*tensors, batch)
    assert (out.shape, out.dtype) == (tensors[0].shape, torch.bfloat16)
    assert [g.shape for g in torch.autograd.grad(out.sum(), tensors)] == [tensor.shape for tensor in tensors]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel needs CUDA")
def test_varlen_on_cuda_equals_each_document_alone() -> None:
    tensors = [tensor.detach().cuda().bfloat16().repeat(1, 1, 1, 8).requires_grad_() for tensor in inputs(2, 21)]
    rows, grad = [[5, 16], [1, 8, 12]], torch.randn(2, 21, 6, 32, device="cuda", dtype=torch.bfloat16)
    out = core("flash", "varlen")(*tensors, {"document_ids": numbered(*rows).cuda()})
    expected = alone(tensors, rows)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    found, wanted = (torch.autograd.grad(result, tensors, grad) for result in (out, expected))
    torch.testing.assert_close(found, wanted, atol=5e-2, rtol=5e-2)
