"""Positions of a span attend to each other both ways, by every kernel, and all others as without spans, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from forge_plugin_transformer import GroupedQueryAttention, InitStd
from forge_plugin_transformer.modules import largest_scores
from forge_plugin_transformer.modules.rotary import rotate
from forge_plugin_transformer.modules.softmax_attention import softmax_attention
from forge_plugin_transformer.modules.spans import SPAN_POSITIONS, with_spans
from forge_plugin_transformer.scoring import Scoring

S = 12
SPANS = [
    [-1, 0, 0, 0, 1, 1, 1, -1, -1, 2, 2, 2],  # two side by side, one at the end
    [0, 0, 0, 0, -1, 0, 0, -1, -1, -1, 1, 1],  # a number that comes back is another span
    [-1] * S,
]
DOCUMENTS = [[0] * 5 + [1] * 7, [0] * 6 + [1] * 6, [0] * 4 + [1] * 8]
"""Bounds within spans, too."""
WINDOW = 3
"""Shorter than the longest span."""
WAYS = [("flash", "mask"), ("flash", "segments"), ("gemm", "mask"), ("gemm", "segments"), ("math", "mask")]


def may_attend(row: int, documents: bool) -> list[list[bool]]:
    """By what the words say, pair by pair: query, key."""
    spans, own = SPANS[row], DOCUMENTS[row] if documents else [0] * S

    def sees(i: int, j: int) -> bool:
        between = range(min(i, j), max(i, j) + 1)
        together = spans[i] >= 0 and all((spans[n], own[n]) == (spans[i], own[i]) for n in between)
        return own[i] == own[j] and (j <= i or together)

    return [[sees(i, j) for j in range(S)] for i in range(S)]


def by_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (tensor.repeat_interleave(q.shape[2] // k.shape[2], 2) for tensor in (k, v))
    scores = torch.einsum("bshe,bthe->bhst", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhst,bthe->bshe", scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1), v)


@pytest.fixture
def make(make_part: Any) -> Any:
    def build(backend: str = "math", way: str = "mask", dtype: torch.dtype = torch.float64, window: int = 0) -> Any:
        component = GroupedQueryAttention(heads=4, kv_heads=2, backend=backend, documents=way, window=window)
        return make_part(component, dtype=dtype, seq_len=S, dim=16, init=InitStd(0.5, 0.5))

    return build


def batch_of(spans: Tensor, documents: bool, at_most: int = S) -> dict[str, Tensor]:
    batch = {"document_ids": torch.tensor(DOCUMENTS)} if documents else {}
    return dict(with_spans(batch, spans, at_most))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("backend", "way"), WAYS)
def test_every_kernel_gives_what_softmax_under_the_mask_gives(
    make: Any, backend: str, way: str, documents: bool
) -> None:
    attention = make(backend, way)
    x = torch.randn(3, S, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    batch = attention.prepare(batch_of(torch.tensor(SPANS), documents, at_most=9))
    out = attention(x, batch)
    q, k, v = attention.project(x, batch)
    cos, sin = attention.rotary(S)
    mask = torch.tensor([may_attend(row, documents) for row in range(3)])
    expected = attention.o(by_softmax(rotate(q, cos, sin), rotate(k, cos, sin), v, mask).flatten(2))
    assert (out - expected).abs().max() < 1e-12
    weights = [x, *attention.parameters()]
    grad = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, weights, grad), torch.autograd.grad(expected, weights, grad)
    for ours, theirs in zip(*grads, strict=True):
        assert (ours - theirs).abs().max() < 1e-11
    plain = attention(x, {name: batch[name] for name in batch if name == "document_ids"})
    assert not torch.equal(out, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("backend", "way"), WAYS)
def test_positions_of_no_span_are_computed_as_without_spans(
    make: Any, backend: str, way: str, dtype: torch.dtype
) -> None:
    attention = make(backend, way, dtype)
    x = torch.randn(3, S, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    spans = torch.tensor(SPANS)
    out = attention(x, batch_of(spans, documents=True))
    plain = attention(x, {"document_ids": torch.tensor(DOCUMENTS)})
    assert torch.equal(out[spans < 0], plain[spans < 0])
    assert not torch.equal(out[spans >= 0], plain[spans >= 0])


def test_without_a_span_gradients_are_those_without_spans_to_the_bit(make: Any) -> None:
    attention = make("flash", "mask", torch.float32)
    x = torch.randn(3, S, 16, generator=torch.Generator().manual_seed(0))
    none = torch.full((3, S), -1)
    grads = [torch.autograd.grad(attention(x, batch).square().sum(), list(attention.parameters()))
             for batch in (batch_of(none, documents=False, at_most=7), {})]  # fmt: skip
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


@pytest.mark.parametrize(("window", "bounded"), [(0, False), (WINDOW, False), (WINDOW, True)])
def test_a_cache_sees_spans(make: Any, window: int, bounded: bool) -> None:
    """A prompt at once, in rows that are padded on the left, then the rest."""
    attention, prompt = make(window=window), 8
    attention.spans_in_windows = bounded
    x = torch.randn(3, S, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spans = torch.tensor(SPANS)
    spans[:, prompt:] = -1
    expected = attention(x, batch_of(spans, documents=False))
    padding = torch.tensor([0, 2, 1])
    positions = torch.arange(S + 2) - padding[:, None]
    source = positions.clamp(0, S - 1)
    shifted, ids = x.gather(1, source[..., None].expand(-1, -1, 16)), spans.gather(1, source).where(positions >= 0, -1)
    cache, parts = attention.new_cache(3, S + 2), []
    for start, stop in ((0, prompt + 2), (prompt + 2, prompt + 3), (prompt + 3, S + 2)):
        piece = {"positions": positions[:, start:stop].clamp(min=-1)}
        batch = with_spans(piece, ids[:, start:stop], stop - start)
        parts.append(attention(shifted[:, start:stop], batch, cache))
    hidden = torch.cat(parts, 1)
    for row, skipped in enumerate(padding.tolist()):
        assert (hidden[row, skipped : skipped + S] - expected[row]).abs().max() < 1e-12


@pytest.mark.parametrize(("documents", "bounded"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("options", [{}, {"sinks": True, "scale": 0.4}], ids=["", "sinks"])
@pytest.mark.parametrize(("backend", "way"), [("flash", "segments"), ("gemm", "mask"), ("math", "mask")])
def test_a_span_is_seen_whole_and_else_the_window(
    make_part: Any, backend: str, way: str, options: dict[str, Any], documents: bool, bounded: bool
) -> None:
    """As in Gemma 3: the images' mask is joined to that of the window. In Gemma 4 the window bounds both."""
    keys = {"heads": 4, "kv_heads": 2, "backend": backend, "documents": way, "window": WINDOW}
    attention = make_part(
        GroupedQueryAttention(**keys, **options), dtype=torch.float64, seq_len=S, dim=16, init=InitStd(0.5, 0.5)
    )
    attention.spans_in_windows = bounded
    x = torch.randn(3, S, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = attention(x, attention.prepare(batch_of(torch.tensor(SPANS), documents)))
    q, k, v = attention.project(x, {})
    cos, sin = attention.rotary(S)
    mask = torch.tensor([may_attend(row, documents) for row in range(3)])
    mask &= torch.ones(S, S, dtype=torch.bool).triu(1 - WINDOW) | torch.tensor(
        [[[SPANS[row][i] >= 0 and SPANS[row][i] == SPANS[row][j] and together(row, i, j) for j in range(S)]
          for i in range(S)] for row in range(3)]
    ) & (not bounded)  # fmt: skip
    sinks = attention.sinks(torch.float64) if options else None
    mixed = softmax_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, mask[:, None], attention.scoring, sinks)
    assert (out - attention.o(mixed.flatten(2))).abs().max() < 1e-12


@pytest.mark.parametrize("backend", ["gemm", "math"])
def test_compiled_layers_attend_in_spans(make_part: Any, backend: Any) -> None:
    torch._dynamo.reset()
    options: Any = {"window": WINDOW, "sinks": True, "soft_cap": 2.0}
    component = GroupedQueryAttention(heads=4, kv_heads=2, backend=backend, **options)
    attention = make_part(component, dtype=torch.float64, seq_len=S, dim=16, init=InitStd(0.5, 0.5))
    x = torch.randn(3, S, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    batch = attention.prepare(batch_of(torch.tensor(SPANS), documents=True, at_most=9))
    results = [attend(x, batch) for attend in (attention, torch.compile(attention, backend="aot_eager"))]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), x) for out in results))


def test_a_layer_without_a_window_ignores_spans_that_are_for_others(make: Any) -> None:
    attention = make()
    x = torch.randn(3, S, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch = batch_of(torch.tensor(SPANS), documents=False)
    seeing = attention(x, attention.prepare(batch))
    attention.spans_in_windows = True
    assert torch.equal(attention(x, attention.prepare(batch)), attention(x, {}))
    assert not torch.equal(seeing, attention(x, {}))


def together(row: int, i: int, j: int) -> bool:
    return all(SPANS[row][n] == SPANS[row][i] for n in range(min(i, j), max(i, j) + 1))


def test_positions_in_spans_come_first_and_none_twice() -> None:
    spans = torch.tensor(SPANS)
    rows = with_spans({}, spans, 9)[SPAN_POSITIONS]
    assert rows.shape == (3, 9)
    for row, own in zip(rows.tolist(), SPANS, strict=True):
        assert len({*row}) == 9
        assert {position for position in range(S) if own[position] >= 0} <= {*row}


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("window", "bounded"), [(0, False), (WINDOW, False), (WINDOW, True)])
def test_the_largest_scores_are_those_of_pairs_that_see_each_other(monkeypatch, window, bounded, documents):
    """In blocks of queries, of which one ends within a span."""
    monkeypatch.setattr(largest_scores, "FEWEST_ROWS", 5)
    q = torch.randn(len(SPANS), S, 4, 8, dtype=torch.float64)
    k = torch.randn(len(SPANS), S, 2, 8, dtype=torch.float64)
    mask = torch.tensor([may_attend(row, documents) for row in range(len(SPANS))])
    if window:
        spans = torch.tensor(SPANS)
        in_span = torch.tensor([may_attend(row, documents) for row in range(len(SPANS))]).triu(1)
        near = torch.ones(S, S, dtype=torch.bool).triu(1 - window)
        whole = in_span.mT | ((spans[:, :, None] >= 0) & torch.eye(S, dtype=torch.bool))
        mask &= near | in_span | (whole & (not bounded))
    scores = torch.einsum("bshe,bthe->bhst", q, k.repeat_interleave(2, 2)) / 8**0.5
    expected = scores.masked_fill(~mask[:, None], -torch.inf).amax((0, 2, 3))
    batch = batch_of(torch.tensor(SPANS), documents)
    found = largest_scores.largest_scores(q, k, batch, Scoring(window=window), bounded=bounded)
    torch.testing.assert_close(found, expected)
