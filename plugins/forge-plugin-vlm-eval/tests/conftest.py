"""Coloured images with questions, as files, and a tiny model that sees them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from PIL import Image

from forge_plugin_images.testing import LANGUAGE, tiny_model

COLOURS = ("red", "green", "blue", "white", "black")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache for every test."""
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """write([further keys of a record, …]) -> a file with a record for each: a coloured image and a question."""

    def make(records: list[dict[str, Any]], name: str = "questions") -> str:
        lines = []
        for number, record in enumerate(records):
            colour = COLOURS[number % len(COLOURS)]
            Image.new("RGB", (16, 8), colour).save(tmp_path / f"{colour}.png")
            lines.append(json.dumps({"image": f"{colour}.png", "question": "which?", "text": colour, **record}))
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    return make


@pytest.fixture(scope="session")
def model() -> Any:
    """Initial weights that are far from uniform guesses."""
    language = attrs.evolve(LANGUAGE, vocab_size=258, layers=2, init_std=0.5)
    return attrs.evolve(tiny_model(8, 16), language=language)
