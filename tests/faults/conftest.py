"""Puts the harness on the path, as it is when `kill.py` runs."""

from __future__ import annotations

import sys
from pathlib import Path

import forked_starts
import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def measured_lives() -> None:
    """A kill comes at a share of how long a process has lived without: not with torch imported for all in that time."""
    forked_starts.prepare()
