"""`forge-run data prepare`, killed at random moments; `kill_prepare.py` does as many as wanted."""

from __future__ import annotations

import kill_prepare
import pytest
from kill_prepare import kill_at_random

pytestmark = pytest.mark.slow


def test_prepared_data_is_as_if_nobody_had_killed_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(kill_prepare, "DOCUMENTS", 2_000)  # some twenty shards and states, of which kills come between
    assert kill_at_random(tmp_path / "prepared", kills=5, seed=1, say=print) == ""


def test_parts_and_joins_that_are_killed_end_as_one_command_does(tmp_path, monkeypatch):
    monkeypatch.setattr(kill_prepare, "DOCUMENTS", 2_000)
    assert kill_at_random(tmp_path / "prepared", kills=3, seed=1, say=print, parts=2) == ""


def test_a_file_that_differs_is_noticed(tmp_path, monkeypatch):
    finish = kill_prepare._finish

    def damaging(folder, workers, delay_s=None):
        finished = finish(folder, workers)
        if delay_s is not None:
            next((folder / "data").glob("*.bin")).write_bytes(b"")
        return finished

    monkeypatch.setattr(kill_prepare, "_finish", damaging)
    monkeypatch.setattr(kill_prepare, "DOCUMENTS", 50)
    assert "these files differ: " in kill_at_random(tmp_path / "prepared", kills=1, seed=1, say=print)
