"""Which files a path, a folder or a glob of a dataset stands for."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from forge_kit.data.data_files import FileFinder, missing, open_regular
from forge_kit.tools.outputs import mark_output
from forge_testing.refusals import lacks, naming


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with two files of data among everything that is none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "data/kept"))
    run = "data/runs/first"
    for name in ("data/a.txt", "data/b/c.txt", "data/.d/e.txt", "data/kept/f.txt", f"{run}/plan.txt", f"{run}/t/g.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    for name in ("job.toml", "provenance.json"):
        (Path(run) / name).touch()
    for folder, name in (("data/saved/step-20", "manifest.json"), ("data/step-by-step", "manifest.json")):
        Path(folder).mkdir(parents=True)
        (Path(folder) / name).touch()
    Path("data/drill").mkdir()
    mark_output(Path("data/drill"))
    os.mkfifo("data/pipe.txt")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("data/socket.txt")
    Path("data/gone.txt").symlink_to("nothing")
    Path("data/itself").symlink_to("itself")
    Path("data/loop").symlink_to(".")
    return tmp_path


NONE = {"run folders": 1, "checkpoints": 1, "folders that Forge wrote": 2}
SPECIAL = {"pipes, sockets or devices": 2, "broken links": 2}
FILES = ["data/a.txt", "data/b/c.txt", "data/step-by-step/manifest.json"]


def test_a_folder_stands_for_its_regular_files_and_what_is_left_out_is_counted(here: Path) -> None:
    finder = FileFinder()
    assert sorted(finder.find("data")) == FILES
    assert finder.left_out == {**NONE, **SPECIAL}


def test_a_glob_reaches_into_no_run_unless_its_own_words_do(here: Path) -> None:
    finder = FileFinder()
    found = {os.path.realpath(path) for path in finder.find("data/**/*.txt")}
    assert found == {str(here / "data/a.txt"), str(here / "data/b/c.txt")}
    assert finder.left_out["run folders"] == 1
    assert FileFinder().find("data/runs/first/*.txt") == ["data/runs/first/plan.txt"]
    assert FileFinder().find("data/runs/first/t") == ["data/runs/first/t/g.txt"]


def test_overlapping_patterns_count_once(here: Path) -> None:
    finder = FileFinder()
    for pattern in ("data", "./data", "data/*"):
        finder.find(pattern)
    assert finder.left_out == {**NONE, **SPECIAL}


@pytest.mark.parametrize(
    ("pattern", "fact"),
    [
        ("data/pipe.txt", "pipe"),
        ("data/runs/first", "no data"),
        ("data/gone.txt", "exist"),
        ("data/*.csv", "matches"),
    ],
)
def test_a_pattern_without_files_has_a_reason(here: Path, pattern: str, fact: str) -> None:
    assert FileFinder().find(pattern) == []
    assert not lacks(missing(pattern), f"'{pattern}'", fact)


def test_a_pipe_that_data_name_is_not_opened(here: Path) -> None:
    with pytest.raises(OSError, match=naming("'data/pipe.txt'", "regular")):
        open_regular("data/pipe.txt")
    Path("data/a.txt").write_bytes(b"text")
    with open_regular("data/a.txt") as file:
        assert file.read() == b"text"
