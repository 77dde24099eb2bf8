"""Builds small models with fusion `mot` in float64, and batches of which some rows have images."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_core.data.reading import collate
from forge_core.engine.build import build_context, build_datasets
from forge_core.parallel.initialise import materialise
from forge_plugin_mot import MixtureOfTransformers
from forge_plugin_vision import GRIDS, IMAGE, VIDEO, FusionComponent
from forge_testing import tiny_job
from forge_testing.catalogs import installed
from forge_testing.vision import RandomImages

sys.path.append(str(Path(__file__).parent))

from mot_models import LANGUAGE, LENGTH, rows, vision_language


@pytest.fixture
def language() -> Any:
    """The language model of the other fixtures."""
    return LANGUAGE


@pytest.fixture
def bare(make_job: Callable[..., Any], build: Callable[..., Any]) -> Callable[..., Any]:
    """bare(fusion, language=…): the model of a job in float64, with initial values."""

    def make(fusion: FusionComponent, language: Any = LANGUAGE) -> Any:
        job = make_job(model=vision_language(fusion, language), precision="fp64", seq_len=LENGTH)
        model = build(job).model
        materialise(model, torch.device("cpu"), seed=0)
        return model

    return make


@pytest.fixture
def make_model(bare: Callable[..., Any]) -> Callable[..., Any]:
    """As `bare`, with norms and biases that are not those of a new model."""

    def make(fusion: FusionComponent | None = None, language: Any = LANGUAGE) -> Any:
        model = bare(fusion or MixtureOfTransformers(), language)
        generator = torch.Generator().manual_seed(5)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data.uniform_(0.5, 1.5, generator=generator)
        return model

    return make


@pytest.fixture(scope="session")
def first_rows(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Tensor]:
    """Four rows: the first and the third without images."""
    model = vision_language(MixtureOfTransformers())
    data = {"sources": (RandomImages(text_only=2),)}
    job = tiny_job(str(tmp_path_factory.mktemp("rows")), installed(), model=model, seq_len=LENGTH, data=data)
    [images] = build_datasets(job, build_context(job, installed(), None))
    return collate([images[number] for number in range(4)])


@pytest.fixture
def batch(first_rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same rows, the second and the fourth with two images each, of which one is a video's."""
    rows = {name: tensor.clone() for name, tensor in first_rows.items()}
    ids = rows["input_ids"]
    after_first = (ids == IMAGE).cumsum(1) > int(rows[GRIDS][1, 0].prod())
    rows["input_ids"] = ids.where(~((ids == IMAGE) & after_first), VIDEO)
    assert [int((rows["input_ids"] == code).sum()) for code in (IMAGE, VIDEO)] == [8, 8]
    return rows


@pytest.fixture
def tiny_rows(make_job: Callable[..., Any]) -> Callable[..., Any]:
    """tiny_rows(fusion, language=…, **changes): a job of three steps, in which every third row has no image."""

    def make(fusion: FusionComponent, language: Any = LANGUAGE, **changes: Any) -> Any:
        return make_job(**{**rows(fusion, language), **changes})

    return make
