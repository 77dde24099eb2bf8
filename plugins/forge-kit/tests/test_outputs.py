"""What a command may write."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core.contracts.errors import JobError
from forge_core.job import JobSection
from forge_kit.outputs import new_folder, output_file


def test_a_folder_with_files_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("# mine")
    with pytest.raises(JobError, match=r"--out .* is not empty"):
        new_folder(tmp_path, "--out")
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]
    assert new_folder(tmp_path / "a/b", "--out").is_dir()


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match=r"--out .*file.* cannot be made: Not a directory"):
        new_folder(tmp_path / "file/store", "--out")
    (tmp_path / "x.html").mkdir()
    with pytest.raises(JobError, match="is a folder"):
        output_file(tmp_path / "x.html", "--out", [".html"])


def test_a_suffix_of_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"--out .*'\.pdf' is no format; end it in \.html or \.md"):
        output_file(tmp_path / "report.pdf", "--out", [".html", ".md"])


def test_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert new_folder(Path("~/acts"), "--out") == tmp_path / "acts"
    assert output_file(Path("~/a.PNG"), "--out", [".png"]) == tmp_path / "a.PNG"


def test_run_folders_are_below_the_home_folder_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert JobSection(output="~/runs").output == str(tmp_path / "runs")
