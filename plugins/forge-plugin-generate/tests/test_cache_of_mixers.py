"""A model with a layer that mixes positions beside attention, and whose cache does not know of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_core.contracts.errors import ForgeError
from forge_core.engine.build import build_bare_model, build_context
from forge_core.parallel.initialise import materialise
from forge_core.plugins.catalog import Catalog
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import tiny_job
from forge_testing.refusals import naming


def model(folder: Path) -> Any:
    component = Transformer(vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=2, kv_heads=2))
    job = tiny_job(str(folder), model=component, precision="fp64")
    built: Any = build_bare_model(job, build_context(job, Catalog.installed(), None))[0]
    materialise(built, torch.device("cpu"), 0)
    return built.eval()


def shifted(x: Tensor) -> Tensor:
    return x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


def generated(model: Any, *, use_cache: bool) -> list[list[int]]:
    return generate(model, [[1, 2, 3]], 4, 99, Sampling(temperature=0), use_cache=use_cache)


def test_a_shift_that_the_cache_forgets_is_refused_by_name(tmp_path: Path) -> None:
    built = model(tmp_path)
    layer, after = built.layers["1"], built.layers["1"].forward
    layer.forward = lambda carry, *others: after((shifted(carry[0]),), *others)
    with pytest.raises(ForgeError, match=naming("layers.1", "TransformerModel", "cache")):
        generated(built, use_cache=True)
    assert len(generated(built, use_cache=False)[0]) == 4


def test_attention_that_does_not_name_its_mixers_and_has_a_cache_generates(tmp_path: Path) -> None:
    built = model(tmp_path)
    expected = generated(built, use_cache=False)
    built.sequence_mixers = dict
    assert generated(built, use_cache=True) == expected
