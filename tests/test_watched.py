"""Thorough tests run when what they watch has changed."""

from __future__ import annotations

import pytest
import watched


@pytest.fixture
def place(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """A repository with one watched file, whose tests have passed."""
    monkeypatch.delenv(watched.ALL, raising=False)
    monkeypatch.setattr(watched, "ROOT", tmp_path)
    monkeypatch.setattr(watched, "RECORD", tmp_path / "watched.sha256")
    monkeypatch.setattr(watched, "digest", watched.digest.__wrapped__)
    path = tmp_path / watched.WATCHED[0] / "suite.py"
    path.parent.mkdir(parents=True)
    path.write_text("x = 1\n")
    watched.RECORD.write_text(f"{watched.digest()}\n")
    return path


def test_without_a_change_they_are_left_out(place):
    assert watched.reason_to_run() == ""


def test_another_comment_is_no_change(place):
    place.write_text("# the size\nx = 1  # in bytes\n")
    assert watched.reason_to_run() == ""


def test_a_changed_a_new_and_a_removed_file_are_noticed(place):
    place.write_text("x = 2\n")
    assert watched.reason_to_run()
    place.write_text("x = 1\n")
    (place.parent / "new.py").write_text("")
    assert watched.reason_to_run()
    (place.parent / "new.py").unlink()
    assert not watched.reason_to_run()
    place.rename(place.with_name("other.py"))
    assert watched.reason_to_run()


def test_another_torch_and_a_missing_record_are_noticed(place, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(watched.metadata, "version", lambda name: "99.0")
        assert watched.reason_to_run()
    assert not watched.reason_to_run()
    watched.RECORD.unlink()
    assert watched.reason_to_run()


def test_the_environment_asks_for_all(place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(watched.ALL, "all")
    assert watched.reason_to_run() == "FORGE_TESTS=all"


def test_every_watched_folder_exists():
    assert [folder for folder in watched.WATCHED if not (watched.ROOT / folder).is_dir()] == []
