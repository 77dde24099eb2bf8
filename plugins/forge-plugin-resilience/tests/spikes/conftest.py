"""Jobs whose runs are watched."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from spiked_runs import make_spikes, watched_job


@pytest.fixture
def spikes():
    """`spiked_runs.make_spikes`."""
    return make_spikes


@pytest.fixture
def spiked(tmp_path, catalog):
    """`spiked_runs.watched_job` in a temporary folder."""
    return partial(watched_job, tmp_path, catalog)
