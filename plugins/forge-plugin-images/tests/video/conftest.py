"""Jobs of clips; puts `video_rows` on the path."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from forge_core.contracts.components import DatasetComponent
from forge_core.engine.build import build_context, build_datasets, build_tokenizer
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_plugin_text import Bytes
from forge_testing import tiny_job
from forge_testing.clips import bar_code, write_clip

sys.path.append(str(Path(__file__).parent))
from video_rows import MODEL


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return Catalog.installed()


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for every test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FORGE_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of `a.mp4` to `d.mp4`: 16 frames of 16 x 48 pixels, of which each carries its number, at 4 a second."""
    folder = tmp_path_factory.mktemp("clips")
    pictures = [bar_code(number, 16, 48) for number in range(16)]
    for name in "abcd":
        write_clip(folder / f"{name}.mp4", pictures, np.arange(16) / 4, options={"g": "5", "crf": "10"})
    return folder


@pytest.fixture
def make_job(tmp_path: Path, catalog: Catalog) -> Callable[..., Job]:
    """(dataset, further settings) -> a tiny job with a vision-language model and the tokenizer `bytes`."""

    def make(dataset: DatasetComponent, data: dict[str, Any] | None = None, **changes: Any) -> Job:
        settings: dict[str, Any] = {"model": MODEL, "seq_len": 160, **changes}
        sources = {"sources": (dataset,), "tokenizer": Bytes(), **(data or {})}
        return tiny_job(str(tmp_path / "runs"), catalog, data=sources, **settings)

    return make


@pytest.fixture
def build(make_job: Callable[..., Job], catalog: Catalog) -> Callable[..., Any]:
    """Like `make_job`, but returns the dataset that the engine builds."""

    def make(dataset: DatasetComponent, **changes: Any) -> Any:
        job = make_job(dataset, **changes)
        context = build_context(job, catalog, None)
        [built] = build_datasets(job, attrs.evolve(context, tokenizer=build_tokenizer(job, context)))
        return built

    return make
