"""A cache of its own for every test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache for every test."""
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path_factory.mktemp("cache")))
