from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_plugin_text.bytes import ByteTokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for every test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FORGE_CACHE", str(folder))
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def make_context():
    """Surroundings of a dataset that is built: (tokenizer, seq_len) -> context."""

    def make(tokenizer: Any = None, seq_len: int = 4) -> SimpleNamespace:
        job = SimpleNamespace(train=SimpleNamespace(seq_len=seq_len), data=SimpleNamespace(tokenizer=object()))
        return SimpleNamespace(job=job, tokenizer=tokenizer or ByteTokenizer(), mesh=None)

    return make


@pytest.fixture
def problems(make_context):
    """Component -> its problems."""
    return lambda component: list(component.problems(make_context().job, None))
