"""Canon layers: against the plain recurrence, apart at documents, in generation, and under layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_kit.nn.position_probe import undeclared_mixer
from forge_plugin_text.packing import Isolate
from forge_plugin_transformer import (
    AttentionComponent,
    AttentionPattern,
    Canon,
    FFNComponent,
    FFNPattern,
    GroupedQueryAttention,
    NoAttention,
    NoFFN,
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


def plain(h: Tensor, weight: Tensor, documents: Tensor, residual: bool) -> Tensor:
    """The definition, number by number: y_t = [h_t +] the sum over k of w_k h_(t - k), in a document."""
    y = h.clone() if residual else torch.zeros_like(h)
    for row in range(len(h)):
        for t in range(h.shape[1]):
            for back in range(weight.shape[1]):
                if back and (t < back or documents[row, t - back] != documents[row, t - back + 1]):
                    break
                y[row, t] += weight[:, -1 - back] * h[row, t - back]
    return y


def reference(model: Any, ids: Tensor, documents: Tensor, points: str, residual: bool) -> Tensor:
    """The model's states with Canon layers by the definition, from its parts without them."""
    (x,) = model.embed({"input_ids": ids})
    batch = {"input_ids": ids, "document_ids": documents}
    for layer in model.layers.values():
        for name, point in (("attention", "A"), ("ffn", "C")):
            part = getattr(layer, name)
            h = getattr(layer, f"{name}_norm")(x)
            if point in points:
                h = plain(h, part.canon.filters.weight, documents, residual)
                x = x + type(part).__mro__[2].forward(part, h, batch)
            else:
                x = x + part(h, batch)
    return model.norm(x)


@pytest.mark.parametrize("points", ["A", "C", "AC"])
@pytest.mark.parametrize("residual", [True, False])
@torch.no_grad()
def test_layers_are_the_recurrence_in_every_document(
    make_model: MakeModel, ids: Tensor, points: str, residual: bool
) -> None:
    canon = Canon(points=tuple(points), kernel=4, residual=residual)  # type: ignore[arg-type]
    model = make_model(dtype=torch.float64, canon=canon)
    for documents in (DOCUMENTS, torch.zeros_like(ids)):
        batch = {"input_ids": ids} | ({"document_ids": documents} if documents.any() else {})
        expected = reference(model, ids, documents, points, residual)
        torch.testing.assert_close(model(batch), expected, rtol=1e-12, atol=1e-12)
    assert "layers.0.attention.q.weight" in model.state_dict(), "parts keep their names"
    assert [name in model.state_dict() for name in FILTERS] == [point in points for point in "AC"]


FILTERS = ("layers.0.attention.canon.filters.weight", "layers.0.ffn.canon.filters.weight")


def hybrid(ffn: FFNComponent) -> dict[str, Any]:
    """Layers of one part each, of which the second has no cache but that of its Canon layer."""
    kinds: dict[str, AttentionComponent] = {"full": GroupedQueryAttention(heads=4), "none": NoAttention()}
    return {
        "attention": AttentionPattern(layers=("full", "none"), kinds=kinds),
        "ffn": FFNPattern(layers=("none", "ffn"), kinds={"none": NoFFN(), "ffn": ffn}),
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "both": {},
    "window and parallel parts": {
        "attention": GroupedQueryAttention(heads=4, window=3),
        "residual": "parallel",
        "norm_placement": "shared",
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
    model = make_model(dtype=torch.float64, canon=Canon())
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


class TestCanon(ModelSuite):
    component = Transformer(
        vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=2), ffn=SwiGLU(hidden=16), canon=Canon()
    )
    layouts = ("fsdp2", "tp2", "pp2", "cp2", "compiled")


class TestCanonAndDocuments(ParitySuite):
    """Layers of one part: each rank has some positions, and documents end anywhere.

    Canon layers before experts are among the tests of forge-plugin-moe.
    """

    layouts = ("cp2", "tp2")

    def parity_changes(self, folder: Any) -> dict[str, Any]:
        return {
            "model": Transformer(vocab_size=32, dim=16, layers=2, canon=Canon(), **hybrid(SwiGLU(hidden=16))),
            "data": {"sources": (RandomDocuments(),), "packing": Isolate()},
        }


def test_what_has_no_canon_layers_is_refused(tmp_path: Path) -> None:
    def refused(**keys: Any) -> list[Any]:
        settings: dict[str, Any] = {"vocab_size": 32, "dim": 16, "layers": 2, "canon": Canon(), **keys}
        return problems_of(tiny_job(str(tmp_path), installed(), model=Transformer(**settings)))

    heads = GroupedQueryAttention(heads=2)
    check_problems(refused(attention=heads, kv_shared_layers=1), at("model.canon.points", "model.kv_shared_layers"))
    check_problems(refused(attention=NoAttention()), at("model.canon.points", "A is before attention", "leave A out"))
    assert not refused(attention=heads)
