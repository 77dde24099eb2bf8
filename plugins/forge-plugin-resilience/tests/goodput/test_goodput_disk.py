"""The disk is found to be full before it is, by the hour."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from forge_plugin_resilience.goodput import Disk
from forge_plugin_resilience.goodput import disk as module
from forge_plugin_resilience.goodput.disk import Sample, forecast, look, size_of
from forge_testing.refusals import lacks

GB, HOUR = 10**9, 3600.0
PLENTY = 1 << 40


def keeps(keep=0, keep_every=0, keep_best=0):
    return SimpleNamespace(keep=keep, keep_every=keep_every, keep_best=keep_best)


def samples(*rows, inodes=(PLENTY,) * 10):
    """From (hours, checkpoints that are there, free GB); a checkpoint takes 10 GB and 4 files."""
    return [
        Sample(t=hours * HOUR, step=int(100 * hours), size=(10 * GB, 4), count=count, free=(int(free * GB), left))
        for (hours, count, free), left in zip(rows, inodes, strict=False)
    ]


def said(rows, folder, ahead=24.0, **keys):
    return forecast(rows, keeps(**keys), folder, ahead * HOUR)


def test_all_are_kept_and_each_takes_room(tmp_path):
    rows = samples((0, 1, 60), (1, 2, 50))
    assert not lacks(said(rows, tmp_path), "full", "Thu 01 Jan, 05:00", "4.0 h", "10.0 GB", "50.0 GB")
    assert said(rows, tmp_path, ahead=3.9) == ""


def test_what_retention_will_delete_is_no_growth(tmp_path):
    assert said(samples((0, 1, 60), (1, 2, 50)), tmp_path, keep=3) == ""  # to 40, and so it stays
    assert not lacks(said(samples((0, 1, 60), (1, 2, 50)), tmp_path, keep=9), "full")
    assert said(samples((0, 3, 60), (1, 3, 60)), tmp_path, keep=3) == ""


def test_the_next_checkpoint_must_fit_besides_the_old_ones(tmp_path):
    text = said(samples((0, 3, 9)), tmp_path, keep=3)
    assert not lacks(text, "no room", "10.0 GB", "9.0 GB")


def test_others_fill_the_disk_too(tmp_path):
    assert "in 8.0 h" in said(samples((0, 3, 60), (1, 3, 55), (2, 3, 50)), tmp_path, keep=3)
    # A few seconds say nothing about hours
    assert said(samples((0, 3, 60), (0.001, 3, 59.99)), tmp_path, keep=3) == ""


def test_checkpoints_that_stay_are_a_rate_of_their_own(tmp_path):
    assert "in 4.0 h" in said(samples((0, 3, 60), (1, 4, 50)), tmp_path, keep=3, keep_every=100)
    assert said(samples((0, 3, 60), (1, 3, 60)), tmp_path, keep=3, keep_every=1000) == ""  # one in ten hours


def test_inodes_run_out_as_bytes_do(tmp_path):
    text = said(samples((0, 1, 9000), (1, 2, 8990), inodes=(28, 24)), tmp_path)
    assert not lacks(text, "5.0 h", "4 inodes", "24 inodes")


def test_a_real_folder_is_measured(tmp_path):
    for step in (1, 2):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}/tensors").write_bytes(bytes(1000))
    (tmp_path / "step-3.tmp").mkdir()
    assert size_of(tmp_path / "step-1") == (1000, 2)
    sample = look(tmp_path / "step-1", 1)
    assert (sample.size, sample.count) == ((1000, 2), 2)
    assert sample.free[0] > 0
    assert look(tmp_path / "step-9", 9) is None


def test_a_run_warns_once(make_job, train, monkeypatch):
    monkeypatch.setattr(module, "forecast", lambda *args: "the disk will be full")
    job = make_job(hooks={"disk": Disk()}, checkpoint={"interval": 1})
    with pytest.warns(UserWarning, match="the disk will be full") as caught:
        train(job)
    assert len([warning for warning in caught if "full" in str(warning.message)]) == 1
