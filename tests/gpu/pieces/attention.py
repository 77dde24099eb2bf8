"""Kernels of attention, against plain matrix products in float64, and how long each takes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from forge_plugin_transformer import AttentionMaskComponent, BidirectionalMask, ChunkedMask, GlobalLocalMask
from forge_plugin_transformer.attention_backends import SUPPORTED, Choice, Kernel, scoring_kernels
from forge_plugin_transformer.document_backends import DocumentChoice, able
from forge_plugin_transformer.modules.attention_core import AttentionCore, torch_attention
from forge_plugin_transformer.modules.documents import document_mask
from forge_plugin_transformer.modules.masks import MaskedCore, pair_mask
from forge_plugin_transformer.scoring import PLAIN, Scoring, visible_pairs
from gpu.bench import Bench, piece, relative_error

DTYPES = {"bfloat16": 2e-2, "float32": 2e-4}
"""And the largest error of result and gradients."""


@piece(
    "attention",
    "flash, cuDNN, memory-efficient, plain and GEMM attention against float64: causal, in windows, by document",
)
def attention(bench: Bench) -> None:
    for dtype, limit in DTYPES.items():
        for documents, window in product((False, True), (0, bench.size(100, 10))):
            reference = _Reference(bench, documents, window)
            for kernel, way in _ways(bench.device.type, dtype, documents):
                with bench.case(f"{kernel}, {dtype}, documents {way}, window {window}"):
                    _try(bench, kernel, way, dtype, limit, reference)


@piece("attention_masks", "chunks, global and local, bidirectional by each kernel against float64, documents too")
def attention_masks(bench: Bench) -> None:
    near = bench.size(64, 8)
    masks = ChunkedMask(chunk_size=near), GlobalLocalMask(window=near, global_positions=2), BidirectionalMask()
    for documents, mask in product((False, True), masks):
        reference = _Reference(bench, documents, 0, mask)
        for dtype, limit in DTYPES.items():
            for kernel, way in _ways(bench.device.type, dtype, documents=True, scoring=reference.scoring):
                with bench.case(f"{kernel}, {dtype}, {way}, {mask}, documents {documents}"):
                    core = MaskedCore(Choice(kernel, ""), DocumentChoice(way, ""), reference.scoring)  # type: ignore[arg-type]
                    error = reference.error(core, bench.device, getattr(torch, dtype))
                    cells = {"kernel": kernel, "dtype": dtype, "way": way, "mask": str(mask), "documents": documents}
                    bench.within("error against float64", error, limit, **cells)


def _ways(device: str, dtype: str, documents: bool, scoring: Scoring = PLAIN) -> Iterator[tuple[Kernel, str | None]]:
    """Kernels with the ways of documents that go with them; None: causal."""
    kernels: list[Kernel] = ["torch", *(name for name, dtypes in SUPPORTED[device].items() if dtype in dtypes)]
    among = scoring_kernels(device, scoring)
    for kernel in kernels:
        if among is not None and kernel not in among:
            continue
        if not documents:
            yield kernel, None
            continue
        yield from ((kernel, way) for way in able(device, dtype, kernel, scoring))


class _Reference:
    """Inputs, and what comes of them in float64 on the CPU."""

    def __init__(
        self, bench: Bench, documents: bool, window: int, pattern: AttentionMaskComponent | None = None
    ) -> None:
        self.scoring = Scoring(window=window, mask=pattern)
        generator = torch.Generator().manual_seed(0)
        length, heads = bench.size(512, 64), 4
        shapes = [(2, length, heads, 64), (2, length, heads // 2, 64), (2, length, heads // 2, 64)]
        self.inputs = [torch.randn(shape, generator=generator).bfloat16().double() for shape in shapes]
        self.grad = torch.randn(shapes[0], generator=generator).bfloat16().double()
        bounds = torch.tensor([0, length // 8, length // 2, length // 2 + 1])
        ids = torch.searchsorted(bounds, torch.arange(length), right=True).expand(2, -1)
        self.batch = {"document_ids": ids.contiguous()} if documents else {}
        q, k, v = (tensor.clone().requires_grad_() for tensor in self.inputs)
        numbers = ids if documents else torch.zeros_like(ids)
        mask = document_mask(numbers, window) if documents or window else None
        if pattern is not None:
            mask = pair_mask(pattern, numbers, window)
        self.result = torch_attention(q, k, v, mask, "math")
        self.gradients = torch.autograd.grad(self.result, (q, k, v), self.grad)

    def error(self, core: AttentionCore, device: torch.device, dtype: torch.dtype) -> float:
        """The largest relative error of result and gradients."""
        batch = {name: tensor.to(device) for name, tensor in self.batch.items()}
        q, k, v = (tensor.to(device, dtype).requires_grad_() for tensor in self.inputs)
        out = core(q, k, v, batch)
        gradients = torch.autograd.grad(out, (q, k, v), self.grad.to(device, dtype))
        pairs = zip((out, *gradients), (self.result, *self.gradients), strict=True)
        return max(relative_error(value, expected) for value, expected in pairs)


def _try(bench: Bench, kernel: Kernel, way: str | None, dtype: str, limit: float, reference: _Reference) -> None:
    documents = DocumentChoice(way or "mask", "")  # type: ignore[arg-type]
    core = AttentionCore(Choice(kernel, ""), documents, reference.scoring)
    kind, device = getattr(torch, dtype), bench.device
    error = reference.error(core, device, kind)
    cells = {"kernel": kernel, "dtype": dtype, "documents": way or "none", "window": reference.scoring.window}
    bench.within("error against float64", error, limit, **cells)
    bench.row("milliseconds forward and backward", **cells, **_time(bench, core, kind, bool(reference.batch)))


def _time(bench: Bench, core: AttentionCore, dtype: torch.dtype, documents: bool) -> dict[str, float]:
    """One sequence of 4,096 positions, 32 heads of which four share a key, documents of 512 positions."""
    length, heads, width = bench.size(4096, 64), bench.size(32, 4), bench.size(128, 32)
    shapes = [(1, length, heads, width), *[(1, length, heads // 4, width)] * 2]
    q, k, v = (torch.randn(shape, device=bench.device, dtype=dtype).requires_grad_() for shape in shapes)
    grad = torch.randn(shapes[0], device=bench.device, dtype=dtype)
    batch = core.prepare({"document_ids": _equal(length, bench.device)} if documents else {})

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(core(q, k, v, batch), (q, k, v), grad)

    milliseconds = bench.milliseconds(both)
    pairs = visible_pairs(length, core.scoring.window)
    operations = 3.5 * 4 * pairs * heads * width  # backward: five products for the two of forward
    return {"ms": milliseconds, "tflops": None if documents else operations / milliseconds / 1e9}  # type: ignore[dict-item]


def _equal(length: int, device: torch.device) -> Tensor:
    return (torch.arange(length, device=device) // max(length // 8, 1))[None]
