"""Real `forge-run` processes, killed at random moments, leave what a run leaves that nobody killed.

Ten kills of two of the scenarios; `kill.py` does as many as wanted, of all.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness.campaign import Campaign
from harness.launch import RUN, Kill
from harness.outcome import differences, read_outcome
from harness.record import Record
from harness.scenarios import Scenario, merge, scenarios
from harness.trial import run_trial

SEED = 1
KILLS = 10
CHOSEN = ("mixture", "async")

pytestmark = pytest.mark.slow


def test_killed_runs_end_as_if_nobody_had(tmp_path, catalog):
    print(f"seed {SEED}")
    record, known = Record(tmp_path / "kills.json"), scenarios(catalog)
    chosen = [known[name] for name in CHOSEN]
    campaign = Campaign(chosen, record, tmp_path / "runs", SEED, print, kills_per_run=(5, 5))
    campaign.run(KILLS, jobs=2)
    assert record.failures == []
    assert record.kills() >= KILLS


def test_a_hook_that_loses_its_state_is_noticed(tmp_path, catalog):
    lossy = {"train": {"steps": 6}, "hooks": {"remembering": {"type": "./parts/hooks.py:Forgetful"}}}
    scenario = Scenario("forgetful", (), merge(scenarios(catalog)["hooks"].job, lossy))
    kill = Kill(moment="committing", save=2, delay_s=0.0, victims="group")
    runs = [(scenario, tmp_path / "whole", [], threading.Event())]
    runs += [(scenario, tmp_path / "killed", [kill], threading.Event())]
    with ThreadPoolExecutor(2) as pool:
        whole, killed = pool.map(lambda run: run_trial(*run), runs)
    assert (whole.problems, killed.problems, len(killed.hits)) == ([], [], 1)
    found = differences(read_outcome(tmp_path / "whole" / RUN), read_outcome(tmp_path / "killed" / RUN))
    assert any(line.startswith("tensors.model.") for line in found)
