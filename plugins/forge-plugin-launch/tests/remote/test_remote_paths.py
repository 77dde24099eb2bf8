"""Paths of this machine that nodes do not have, and names of runs where few characters are allowed."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core import load_job
from forge_core.contracts.errors import JobError
from forge_plugin_launch.clusters import SubmittedRun
from forge_plugin_launch.remote.paths import demand_sendable, folder_line, is_below, name_of, path_problems
from forge_testing.tiny import TINY_JOB

ALLOWED = f"{string.ascii_lowercase}{string.digits}-"
SOURCES = """
[data]
sources = [
    { type = "text", path = ["here.txt", "OUTSIDE/there.txt"] },
    { type = "text", path = "OUTSIDE/mounted/data.txt" },
]
tokenizer = { type = "bytes" }
"""


def test_paths_of_a_job_that_are_here_and_neither_copied_nor_mounted_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, outside = tmp_path / "work", tmp_path / "outside"
    for path in (work / "here.txt", outside / "there.txt", outside / "mounted" / "data.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("words\n" * 100)
    monkeypatch.chdir(work)
    Path("job.toml").write_text(TINY_JOB)
    Path("data.toml").write_text(SOURCES.replace("OUTSIDE", str(outside)))
    job = load_job("job.toml", "data.toml")
    found = {problem.path: problem.message for problem in path_problems(job, [str(outside / "mounted")], work)}
    assert list(found) == ["data.sources.0.path[1]"]
    assert str(outside / "there.txt") in found["data.sources.0.path[1]"]
    # A copy of another folder than this one
    assert "data.sources.0.path[0]" in {problem.path for problem in path_problems(job, [], work / "code")}


def test_the_innermost_mount_counts_and_names_are_no_prefixes() -> None:
    assert is_below("/a/b/c", ["/a", "/a/b"]) == "/a/b"
    assert is_below("/ab/c", ["/a"]) == ""
    assert is_below("~/runs", ["~/"]) == "~/"


def test_job_files_must_be_in_the_copy_and_the_line_goes_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "sub dir").mkdir()
    (tmp_path / "job.toml").write_text("")
    run = SubmittedRun(name="x", folder=Path("runs/x"), work=tmp_path / "sub dir", words=("../job.toml", "--a=1"))
    demand_sendable(run, tmp_path)
    assert folder_line(run.work, tmp_path) == "cd 'sub dir'"
    assert folder_line(tmp_path, tmp_path) == ""
    with pytest.raises(JobError, match=r"\.\./job\.toml: the nodes have a copy of"):
        demand_sendable(run, run.work)


@given(st.text(f"{string.ascii_letters}{string.digits}._-", min_size=1, max_size=200))
def test_names_have_allowed_characters_and_their_length(name: str) -> None:
    made = name_of(name, ALLOWED, 41, "run-")
    assert set(made) <= set(ALLOWED)
    assert made[0].isalpha()
    assert made[-1] != "-"
    assert len(made) <= 41
    assert name_of(made, ALLOWED, 41, "run-") == made, "a name that is allowed stays"
