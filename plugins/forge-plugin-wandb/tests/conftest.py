"""A server of Weights & Biases in memory, to which W&B's own client sends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from wandb_server import WandbServer

from forge_core.engine.build import build_context


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    """Nothing of the user's own account, and no cache of theirs."""
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb-of-the-user"))


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with WandbServer() as server:
        yield server


@pytest.fixture
def logger_context(make_job, catalog, tmp_path):
    """What a logger is built from, without a run."""
    return build_context(make_job(), catalog, tmp_path)
