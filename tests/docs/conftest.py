"""The example plugin, installed for a session without a trace in the environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fences


@pytest.fixture(scope="session")
def installed_example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip has installed it; takes effect as PYTHONPATH."""
    return fences.install_example(tmp_path_factory.mktemp("installed"))
