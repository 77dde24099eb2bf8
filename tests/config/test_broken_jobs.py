"""The corpus of broken jobs: what a user gets for each is in the `.txt` beside the `.toml`, to the letter.

The first line of each job is the command, as it would be typed in the job's own folder.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from job_parts import make_catalog

from forge_core.cli import main
from forge_core.contracts.errors import ExitCode
from forge_core.plugins.catalog import Catalog

CORPUS = Path(__file__).parent / "broken"
JOBS = sorted(path for path in CORPUS.glob("*/*.toml"))
CLASSES = sorted({path.parent.name for path in JOBS})


def command_of(job: Path) -> list[str]:
    program, *arguments = shlex.split(job.read_text().partition("\n")[0].removeprefix("# "))
    assert program == "forge-run", f"{job} must begin with its command"
    return arguments


@pytest.mark.parametrize("job", JOBS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_broken_job_gives_exactly_this_message(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(job.parent)
    monkeypatch.setattr(Catalog, "installed", classmethod(lambda cls: make_catalog()))
    before = sorted(CORPUS.rglob("*"))
    assert main(command_of(job)) == ExitCode.BAD_JOB
    out, err = capsys.readouterr()
    assert out == ""
    assert err == job.with_suffix(".txt").read_text()
    assert sorted(CORPUS.rglob("*")) == before, "nothing is created on disk"


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_of_mistake_has_at_least_four_jobs(name: str) -> None:
    assert len([job for job in JOBS if job.parent.name == name]) >= 4


def test_there_are_at_least_fifteen_classes_of_mistakes() -> None:
    assert len(CLASSES) >= 15


def test_what_they_build_upon_is_right(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(CORPUS)
    monkeypatch.setattr(Catalog, "installed", classmethod(lambda cls: make_catalog()))
    assert main(["check", "good.toml"]) == ExitCode.FINISHED
    assert capsys.readouterr().out.startswith("ok: good.toml\n")
