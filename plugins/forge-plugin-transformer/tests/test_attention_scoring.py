"""Windows, scales, caps and sinks: every kernel and way computes what the definition says, gradients included."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from forge_plugin_transformer.attention_backends import Choice
from forge_plugin_transformer.document_backends import DocumentChoice
from forge_plugin_transformer.modules import gemm_attention, segment_attention, varlen_attention
from forge_plugin_transformer.modules.attention_core import AttentionCore, torch_attention
from forge_plugin_transformer.scoring import Scoring

S = 21
DOCUMENTS = {"one": None, "several": [[5, 16], [1, 1, 3, 8, 8]]}
WAYS = [
    ("torch", "segments"),
    ("torch", "mask"),
    ("flash", "segments"),
    ("flash", "mask"),
    ("math", "mask"),
    ("gemm", "segments"),
    ("gemm", "mask"),
]
WINDOWS = [1, 2, 3, 7, 8, 9, 20, 21, 40]
SCORINGS = {
    "window": {},
    "scale": {"scale": 0.3},
    "sinks": {"sinks": True},
    "soft_cap": {"soft_cap": 1.5},
    "all": {"scale": 0.7, "sinks": True, "soft_cap": 2.0},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, the last one short, in few positions; only short documents go together."""
    monkeypatch.setattr(gemm_attention, "BLOCK", 8)
    monkeypatch.setattr(segment_attention, "TOGETHER", 6)
    monkeypatch.setattr(segment_attention, "WINDOW_BLOCK", 4)


def inputs(dtype: torch.dtype = torch.float64, values: int = 4) -> list[Tensor]:
    """6 query heads in 2 groups, of width 4, and the sinks of the 6."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, S, 6, 4), (2, S, 2, 4), (2, S, 2, values), (6,)]
    drawn = [torch.randn(shape, dtype=torch.float64, generator=generator) * 1.5 for shape in shapes]
    return [tensor.to(dtype).requires_grad_() for tensor in drawn]


def ids_of(name: str) -> dict[str, Tensor]:
    rows = DOCUMENTS[name]
    if rows is None:
        return {}
    numbers = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows]
    return {"document_ids": torch.stack(numbers)}


def definition(tensors: list[Tensor], batch: dict[str, Tensor], scoring: Scoring) -> Tensor:
    """Pair by pair, as transformers' masks say: `kv_idx <= q_idx and kv_idx > q_idx - sliding_window`."""
    q, k, v, sinks = tensors
    k, v = (tensor.repeat_interleave(3, 2) for tensor in (k, v))
    documents = batch.get("document_ids", torch.zeros(2, S))
    sees = [
        [
            [j <= i and (not scoring.window or j > i - scoring.window) and bool(row[i] == row[j]) for j in range(S)]
            for i in range(S)
        ]
        for row in documents
    ]
    scores = torch.einsum("bshe,bthe->bhst", q, k) * (scoring.scale or 1 / math.sqrt(4))
    if scoring.soft_cap:
        scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
    weights = scores.exp() * torch.tensor(sees)[:, None]
    sums = weights.sum(-1, keepdim=True)
    if scoring.sinks:
        sums = sums + sinks.exp()[None, :, None, None]
    return torch.einsum("bhst,bthe->bshe", weights / sums, v)


def core(kernel: str, way: str, scoring: Scoring) -> AttentionCore:
    return AttentionCore(Choice(kernel, ""), DocumentChoice(way, ""), scoring)


def attend(kernel: str, way: str, scoring: Scoring, tensors: list[Tensor], batch: Any) -> Tensor:
    q, k, v, sinks = tensors
    return core(kernel, way, scoring)(q, k, v, batch, *([sinks] if scoring.sinks else []))


def with_gradients(out: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape).sin()
    grads = torch.autograd.grad((out * weights).sum(), tensors, allow_unused=True)
    return [out, *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("name", SCORINGS)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("kernel", "way"), WAYS)
def test_forward_and_backward_equal_the_definition(kernel: str, way: str, documents: str, name: str) -> None:
    batch = ids_of(documents)
    if kernel in ("torch", "flash") and "soft_cap" in SCORINGS[name]:
        pytest.skip("refused when the job is checked")
    if kernel in ("torch", "flash") and way == "mask" and "sinks" in SCORINGS[name]:
        pytest.skip("refused when the job is checked")
    for window in [0, *WINDOWS]:
        scoring, tensors = Scoring(window=window, **SCORINGS[name]), inputs()
        found, expected = attend(kernel, way, scoring, tensors, batch), definition(tensors, batch, scoring)
        for ours, theirs in zip(with_gradients(found, tensors), with_gradients(expected, tensors), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-9, msg=lambda t, w=window: f"window {w}: {t}")


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("kernel", "way"), WAYS)
def test_a_window_of_the_whole_sequence_is_none_to_the_bit(kernel: str, way: str, documents: str) -> None:
    batch, tensors = ids_of(documents), inputs(torch.float32)
    without = with_gradients(attend(kernel, way, Scoring(), tensors, batch), tensors)
    for window in (S, S + 1, 1000):
        found = with_gradients(attend(kernel, way, Scoring(window=window), tensors, batch), tensors)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, without, strict=True))


@pytest.mark.parametrize(("kernel", "way"), WAYS)
def test_values_may_be_narrower_than_keys(kernel: str, way: str) -> None:
    scoring, tensors = Scoring(window=6, scale=0.4), inputs(values=3)
    for documents in DOCUMENTS:
        batch = ids_of(documents)
        found, expected = attend(kernel, way, scoring, tensors, batch), definition(tensors, batch, scoring)
        for ours, theirs in zip(with_gradients(found, tensors), with_gradients(expected, tensors), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("keep_up_to", [0, S], ids=["recomputed", "kept"])
@pytest.mark.parametrize("way", ["mask", "segments"])
def test_gemm_computes_longer_sequences_again(monkeypatch: pytest.MonkeyPatch, way: str, keep_up_to: int) -> None:
    monkeypatch.setattr(gemm_attention, "KEEP_UP_TO", keep_up_to)
    scoring, tensors = Scoring(window=9, sinks=True), inputs()
    for documents in DOCUMENTS:
        batch = ids_of(documents)
        found, expected = attend("gemm", way, scoring, tensors, batch), definition(tensors, batch, scoring)
        for ours, theirs in zip(with_gradients(found, tensors), with_gradients(expected, tensors), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-9)


def test_gemm_skips_blocks_outside_of_the_window() -> None:
    q, k, *_ = inputs()
    keys = [(block.keys.start, block.keys.stop) for block in gemm_attention._blocks(q, k, 3)]
    assert keys == [(0, 8), (6, 16), (14, 21)]
    assert gemm_attention.kept_size(q, k, 3) == 2 * 6 * (8 * 8 + 8 * 10 + 5 * 7)


@pytest.mark.parametrize("window", [1, 5, 9])
def test_flash_computes_no_key_that_no_query_of_a_block_sees(window: int) -> None:
    ids = ids_of("several")["document_ids"]
    starts = segment_attention.document_starts(ids).cumsum(1).flatten() + torch.tensor([0, 100]).repeat_interleave(S)
    covered = []
    for segment in segment_attention.segments(ids, window, block=4):
        covered += range(segment.positions.start, segment.positions.stop)
        assert segment.keys.stop == segment.positions.stop
        if starts[segment.positions].unique().numel() == 1:  # else short documents, together
            assert segment.keys.start >= segment.positions.start - window + 1
            assert starts[segment.keys].unique().numel() == 1
    assert covered == list(range(2 * S))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["window", "sinks", "all"])
@pytest.mark.parametrize(("kernel", "way"), [("flash", "segments"), ("gemm", "segments"), ("gemm", "mask")])
def test_low_precision_is_near_the_truth(kernel: str, way: str, name: str, dtype: torch.dtype) -> None:
    if kernel == "flash" and name == "all":
        pytest.skip("refused when the job is checked")
    scoring, low = Scoring(window=6, **SCORINGS[name]), inputs(dtype)
    high = [tensor.detach().double().requires_grad_() for tensor in low]
    batch = ids_of("several")
    found = with_gradients(attend(kernel, way, scoring, low, batch), low)
    expected = with_gradients(definition(high, batch, scoring), high)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() < (1e-5 if dtype == torch.float32 else 2e-2) * theirs.norm()


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_operators_are_what_they_declare(sinks: bool) -> None:
    q, k, v, given = inputs(torch.float32)
    options = (given if sinks else None, 5, 0.3, 0.0)
    torch.library.opcheck(gemm_attention._attend, (q, k, v, None, True, *options))
    torch.library.opcheck(gemm_attention._attend, (q, k, v, None, False, *options[:3], 2.0))
    for document_ids in (None, ids_of("several")["document_ids"]):
        torch.library.opcheck(segment_attention._attend, (q, k, v, document_ids, "flash", True, *options))


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize(("kernel", "way"), [("flash", "segments"), ("gemm", "segments"), ("gemm", "mask")])
def test_torch_counts_the_flops_of_operators(kernel: str, way: str, window: int) -> None:
    tensors, batch = inputs(torch.float32), ids_of("several")
    with FlopCounterMode(display=False) as counter:
        out = attend(kernel, way, Scoring(window=window), tensors, batch)
        forward = counter.get_total_flops()
        out.sum().backward()
    pairs = S * (window or S) - (window or S) ** 2 / 2
    assert forward == 2 * 6 * pairs * 2 * 2 * 4  # rows, heads, scores and mixing, a product and a sum, width
    assert counter.get_total_flops() == 3.5 * forward


@pytest.mark.parametrize("name", ["window", "sinks"])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("kernel", "way"), [("flash", "segments"), ("gemm", "mask"), ("math", "mask")])
def test_a_compiled_graph_is_not_broken(kernel: str, way: str, documents: str, name: str) -> None:
    torch._dynamo.reset()
    plain, tensors = core(kernel, way, Scoring(window=6, **SCORINGS[name])), inputs(torch.float32)
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True, dynamic=False)
    arguments, batch = tensors if name == "sinks" else tensors[:3], plain.prepare(ids_of(documents))
    q, k, v, *rest = arguments
    found, expected = (with_gradients(attention(q, k, v, batch, *rest), arguments) for attention in (compiled, plain))
    torch.testing.assert_close(found, expected)


def test_layers_with_other_windows_share_no_mask() -> None:
    batch, tensors = ids_of("several"), inputs()
    cores = [core("math", "mask", Scoring(window=window)) for window in (0, 3, 5, 100)]
    for attention in cores:
        batch = dict(attention.prepare(batch))
    assert sorted(batch) == ["document_ids", "document_mask", "document_mask within 3", "document_mask within 5"]
    for attention in cores:
        expected = definition(tensors, ids_of("several"), attention.scoring)
        torch.testing.assert_close(attention(*tensors[:3], batch), expected)


# --- CUDA -------------------------------------------------------------------------------------------------------------


def reference_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    scale: float | None = None,
) -> Tensor:
    """As `torch.nn.attention.varlen.varlen_attn` documents it: `window_size` positions before and after each."""
    out = torch.empty_like(q)
    for start, stop in itertools.pairwise(cu_q.tolist()):
        if stop > start:
            before, index = window_size[0], torch.arange(stop - start)
            distance = index[:, None] - index
            mask = (distance >= 0) & ((before < 0) | (distance <= before))
            parts = (t[None, start:stop] for t in (q, k, v))
            out[start:stop] = torch_attention(*parts, mask[None, None], "math", Scoring(scale=scale or 0.0))[0]
    return out


def test_varlen_gets_window_and_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_attention, "varlen_attn", reference_varlen)
    tensors, batch = inputs(), ids_of("several")
    for window, scale in [(0, 0.0), (1, 0.0), (5, 0.3), (S, 0.3)]:
        scoring = Scoring(window=window, scale=scale)
        torch.testing.assert_close(
            attend("flash", "varlen", scoring, tensors, batch), definition(tensors, batch, scoring)
        )


def test_varlen_of_this_torch_takes_a_window() -> None:
    """Without a device: shapes and arguments only."""
    tensors = [tensor.detach().bfloat16().to("meta").requires_grad_() for tensor in inputs()[:3]]
    bounds = torch.empty(16, dtype=torch.int32, device="meta")
    batch = {"document_ids": torch.empty(2, S, device="meta"), "document_bounds": bounds}
    out = core("flash", "varlen", Scoring(window=5, scale=0.3))(*tensors, batch)
    assert [g.shape for g in torch.autograd.grad(out.sum(), tensors)] == [tensor.shape for tensor in tensors]


CUDA_WAYS = [
    ("flash", "varlen"),
    ("torch", "varlen"),
    ("efficient", "mask"),
    ("cudnn", "mask"),
    ("gemm", "mask"),
    ("math", "mask"),
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel needs CUDA")
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("kernel", "way"), CUDA_WAYS)
def test_on_cuda_equals_the_definition(kernel: str, way: str, documents: str) -> None:
    *heads, sinks = (tensor.detach().bfloat16() for tensor in inputs())
    low = [*(tensor.repeat(1, 1, 1, 8) for tensor in heads), sinks]
    names = ["window", "scale", *(["sinks", "all"] if kernel in ("gemm", "math") else [])]
    for name, window in itertools.product(names, (0, 3, 9)):
        # Heads are 32 wide here, and the definition's own factor is that of 4.
        scoring = Scoring(**({"scale": 0.5} | SCORINGS[name] | {"window": window}))
        on_cuda = [tensor.cuda().requires_grad_() for tensor in low]
        batch = {key: value.cuda() for key, value in ids_of(documents).items()}
        found = with_gradients(attend(kernel, way, scoring, on_cuda, batch).cpu(), on_cuda)
        high = [tensor.double().requires_grad_() for tensor in low]
        expected = with_gradients(definition(high, ids_of(documents), scoring), high)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.cpu().double() - theirs).norm() < 3e-2 * theirs.norm(), (name, window)
