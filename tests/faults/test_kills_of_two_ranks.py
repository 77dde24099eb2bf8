"""Real runs of two ranks, of which one, the launcher or all are killed at random moments."""

from __future__ import annotations

import pytest
from attrs import evolve
from harness.campaign import Campaign
from harness.record import Record
from harness.scenarios import merge, scenarios

SEED = 1

pytestmark = pytest.mark.slow


def test_killed_runs_of_two_ranks_end_as_if_nobody_had(tmp_path, catalog):
    record, known = Record(tmp_path / "kills.json"), scenarios(catalog)
    # Half as long as those of `kill.py`: kills come within the first three saves of a start
    fewer = {"replicate2": {"train": {"steps": 8}}, "fsdp2": {"train": {"steps": 6}, "data": {"workers": 1}}}
    chosen = [evolve(known[name], job=merge(known[name].job, changes)) for name, changes in fewer.items()]
    Campaign(chosen, record, tmp_path / "runs", SEED, print, kills_per_run=(2, 2)).run(4, jobs=2)
    assert record.failures == []
    assert record.kills() >= 4
