"""Canon layers: against the authors' convolution, apart at documents, in generation, and under layouts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from forge_kit.nn.position_probe import undeclared_mixer
from forge_plugin_text.packing import Isolate
from forge_plugin_transformer import (
    GEGLU,
    GELU,
    XIELU,
    AttentionComponent,
    AttentionPattern,
    Canon,
    FFNComponent,
    FFNPattern,
    GroupedQueryAttention,
    NoAttention,
    NoFFN,
    ParallelAttention,
    SwiGLU,
    Transformer,
)
from forge_testing import tiny_job
from forge_testing.catalogs import installed
from forge_testing.documents import RandomDocuments
from forge_testing.refusals import at, check_problems, problems_of
from forge_testing.suites import ModelSuite
from forge_testing.suites.parity import ParitySuite

MakeModel = Callable[..., Any]
DOCUMENTS = torch.tensor([[7] * 5 + [3] * 2 + [7] * 9, [0] * 12 + [1] * 4])
"""One of two positions is between two with equal ids, nearer to each other than a kernel reaches."""


def convolved(h: Tensor, weight: Tensor, documents: Tensor, residual: bool) -> Tensor:
    """[h +] the convolution as the authors' code has it, of torch, with documents as rows of their own."""
    y = h.clone() if residual else torch.zeros_like(h)
    for row, ids in enumerate(documents.tolist()):
        starts = [0, *(t for t in range(1, len(ids)) if ids[t] != ids[t - 1]), len(ids)]
        for start, stop in pairwise(starts):
            document = h[row : row + 1, start:stop].mT
            padding = weight.shape[1] - 1
            whole = F.conv1d(document, weight[:, None], padding=padding, groups=len(weight))
            y[row, start:stop] += whole[0, :, : stop - start].mT
    return y


def reference(model: Any, ids: Tensor, documents: Tensor, points: str, residual: bool) -> Tensor:
    """The model's states with Canon layers as the authors have them, from its parts without them.

    B and D convolve what both steps have between them side by side, as one tensor.
    """
    (x,) = model.embed({"input_ids": ids})
    batch = {"input_ids": ids, "document_ids": documents}
    for layer in model.layers.values():
        for name, (before, within) in {"attention": "AB", "ffn": "CD"}.items():
            part = getattr(layer, name)
            h = getattr(layer, f"{name}_norm")(x)
            if before in points:
                h = convolved(h, part.canon.filters.weight, documents, residual)
            projected = part.project(h, batch)
            if within in points:
                weight = torch.cat([inner.filters.weight for inner in part.inner_canon.values()])
                mixed = convolved(torch.cat([p.flatten(2) for p in projected], -1), weight, documents, residual)
                widths = [p.flatten(2).shape[-1] for p in projected]
                projected = [m.view_as(p) for m, p in zip(mixed.split(widths, -1), projected, strict=True)]
            x = x + part.finish(projected, h, batch)
    return model.norm(x)


ATTENTION = GroupedQueryAttention(heads=4, kv_heads=2, v_head_dim=6, qk_norm="all", gate=True)
FFNS: dict[str, FFNComponent] = {
    "A": SwiGLU(hidden=24), "AC": SwiGLU(hidden=24), "B": GELU(hidden=24), "D": GEGLU(hidden=24, sparsity=0.5),
    "ABCD": SwiGLU(hidden=24, gate_scale=0.5, scale=2.0), "BD": XIELU(hidden=24),
}  # fmt: skip


@pytest.mark.parametrize("points", FFNS)
@torch.no_grad()
def test_layers_are_the_convolution_of_the_authors_in_every_document(
    make_model: MakeModel, ids: Tensor, points: str
) -> None:
    for residual in (True, False):
        canon = Canon(points=tuple(points), kernel=4, residual=residual)  # type: ignore[arg-type]
        model = make_model(dtype=torch.float64, attention=ATTENTION, ffn=FFNS[points], canon=canon)
        for documents in (DOCUMENTS, torch.zeros_like(ids)):
            batch = {"input_ids": ids} | ({"document_ids": documents} if documents.any() else {})
            expected = reference(model, ids, documents, points, residual)
            torch.testing.assert_close(model(batch), expected, rtol=1e-12, atol=1e-12)
    assert "layers.0.attention.q.weight" in model.state_dict(), "parts keep their names"
    assert [name in model.state_dict() for name in FILTERS] == [point in points for point in "ABCD"]


FILTERS = [
    f"layers.0.{name}.filters.weight"
    for name in ("attention.canon", "attention.inner_canon.v", "ffn.canon", "ffn.inner_canon.up")
]


def hybrid(ffn: FFNComponent) -> dict[str, Any]:
    """Layers of one part each, of which the second has no cache but that of its Canon layer."""
    kinds: dict[str, AttentionComponent] = {"full": GroupedQueryAttention(heads=4), "none": NoAttention()}
    return {
        "attention": AttentionPattern(layers=("full", "none"), kinds=kinds),
        "ffn": FFNPattern(layers=("none", "ffn"), kinds={"none": NoFFN(), "ffn": ffn}),
    }


EVERYWHERE = Canon(points=("A", "B", "C", "D"))
SETTINGS: dict[str, dict[str, Any]] = {
    "both": {},
    "everywhere": {"canon": EVERYWHERE, "attention": ATTENTION},
    "window and parallel parts": {
        "attention": GroupedQueryAttention(heads=4, window=3),
        "residual": "parallel",
        "norm_placement": "shared",
        "canon": Canon(points=("B", "D")),
    },
    "layers of one part": hybrid(SwiGLU(hidden=16)),
    "before feed-forward parts": {"canon": Canon(points=("C",), kernel=3)},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("chunks", [[16], [1] * 16, [5, 1, 1, 9]], ids=str)
@torch.no_grad()
def test_cached_equals_uncached(make_model: MakeModel, ids: Tensor, settings: Any, chunks: list[int]) -> None:
    model = make_model(dtype=torch.float64, **{"canon": Canon(), **settings})
    cache = model.new_cache(2, 16)
    outputs = [model.decode({"input_ids": part}, cache) for part in ids.split(chunks, 1)]
    torch.testing.assert_close(torch.cat(outputs, 1), model({"input_ids": ids}), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_left_padding_is_ignored_and_rows_join(make_model: MakeModel, ids: Tensor) -> None:
    model = make_model(dtype=torch.float64, canon=EVERYWHERE)
    whole = model({"input_ids": ids})
    cache = model.new_cache(2, 16)
    positions = torch.arange(10).expand(2, -1) - torch.tensor([[0], [4]])
    padded = torch.stack([ids[0, :10], torch.cat([ids[1, :4] * 0, ids[1, :6]])])
    y = model.decode({"input_ids": padded, "positions": positions.clamp(min=-1)}, cache)
    torch.testing.assert_close(y[0], whole[0, :10], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(y[1, 4:], whole[1, :6], rtol=1e-10, atol=1e-10)
    assert cache.joinable
    swapped = cache.joined([(cache, torch.tensor([1, 0]))], 10, 16)
    y = model.decode(
        {"input_ids": torch.stack([ids[1, 6:7], ids[0, 10:11]]), "positions": torch.tensor([[6], [10]])}, swapped
    )
    torch.testing.assert_close(y[:, 0], torch.stack([whole[1, 6], whole[0, 10]]), rtol=1e-10, atol=1e-10)


def test_every_mixer_is_named(make_model: MakeModel) -> None:
    """Else the probe of `cp` would refuse the model, as it does without the name of one."""
    for settings in SETTINGS.values():
        model = make_model(**{"canon": Canon(), **settings})
        assert undeclared_mixer(model) is None
    mixers = dict(model.sequence_mixers())
    del mixers["layers.0.ffn.canon.core"]
    model.sequence_mixers = lambda: mixers
    assert undeclared_mixer(model) == "layers.0.ffn.canon.core"


@torch.no_grad()
def test_positions_of_the_latest_call_are_forgotten(make_model: MakeModel, ids: Tensor) -> None:
    model = make_model(dtype=torch.float64, canon=EVERYWHERE)
    cache = model.new_cache(2, 16)
    assert cache.forgets == ""
    outputs = []
    for start, stop, kept in ((0, 5, 3), (3, 6, 5), (5, 6, 6), (6, 16, 16)):
        wrong = ids[:, start:stop].clone()
        wrong[:, kept - start :] = 60 - wrong[:, kept - start :]
        outputs.append(model.decode({"input_ids": wrong}, cache)[:, : kept - start])
        cache.forget(stop - kept)
    torch.testing.assert_close(torch.cat(outputs, 1), model({"input_ids": ids}), rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="11 positions are to be forgotten, and the latest call had 10"):
        cache["0"]["ffn"].forget(11)


class TestCanon(ModelSuite):
    component = Transformer(
        vocab_size=32,
        dim=16,
        layers=2,
        attention=GroupedQueryAttention(heads=4, kv_heads=2, qk_norm="all"),
        ffn=SwiGLU(hidden=16),
        canon=EVERYWHERE,
    )
    layouts = ("tp2", "tp2_whole_sequences", "traced")


class TestCanonAndDocuments(ParitySuite):
    """Layers of one part: each rank has some positions, and documents end anywhere.

    Canon layers before experts are among the tests of forge-plugin-moe.
    """

    layouts = ("cp2",)

    def parity_changes(self, folder: Any) -> dict[str, Any]:
        return {
            "model": Transformer(vocab_size=32, dim=16, layers=2, canon=EVERYWHERE, **hybrid(SwiGLU(hidden=16))),
            "data": {"sources": (RandomDocuments(),), "packing": Isolate()},
        }


class OwnFFN(FFNComponent):
    """Of a stranger, who has said nothing of two steps."""


def test_what_has_no_canon_layers_is_refused(tmp_path: Path) -> None:
    def refused(**keys: Any) -> list[Any]:
        settings: dict[str, Any] = {"vocab_size": 32, "dim": 16, "layers": 2, "canon": Canon(), **keys}
        return problems_of(tiny_job(str(tmp_path), installed(), model=Transformer(**settings)))

    heads = GroupedQueryAttention(heads=2)
    check_problems(refused(attention=heads, kv_shared_layers=1), at("model.canon.points", "model.kv_shared_layers"))
    check_problems(refused(attention=NoAttention()), at("model.canon.points", "A is before attention", "leave A out"))
    mixed = ParallelAttention(mixers={"near": heads, "far": heads})
    within = refused(attention=mixed, ffn=OwnFFN(), canon=EVERYWHERE)
    check_problems(
        within,
        at("model.canon.points", "B is within", "ParallelAttention"),
        at("model.canon.points", "D is within", "OwnFFN"),
    )
    assert not refused(attention=heads, canon=EVERYWHERE)
