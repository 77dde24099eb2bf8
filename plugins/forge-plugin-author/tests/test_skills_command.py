"""`forge-run skills`: what is installed where, and that nothing of a user's is overwritten."""

from __future__ import annotations

import contextlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hatchling.build import build_wheel

from forge_core.cli import main
from forge_plugin_author import skill_files
from forge_plugin_author.skill_files import MAIN, RECORD, TARGETS, head_of, installed_version, shipped_skills

Capture = pytest.CaptureFixture[str]
Here = Callable[..., int]


@pytest.fixture
def skills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    """The command, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: main(["skills", "install", *words])


def test_the_wheel_has_every_file_of_every_skill(tmp_path: Path) -> None:
    with contextlib.chdir(Path(__file__).parents[1]):
        wheel = build_wheel(str(tmp_path))
    files = zipfile.ZipFile(tmp_path / wheel).namelist()
    expected = {f"forge_plugin_author/skills/{path}" for skill in shipped_skills() for path in skill.files()}
    assert expected <= {*files}
    assert {"forge_plugin_author/errors.toml", "forge_plugin_author/skills/help.json"} <= {*files}


@pytest.mark.parametrize("target", ["agents", "claude", "codex", "elsewhere/skills"])
def test_all_skills_are_installed_where_an_assistant_looks(target: str, skills: Here, tmp_path: Path) -> None:
    assert skills("--target", target) == 0
    folder = tmp_path / TARGETS.get(target, target)
    for skill in shipped_skills():
        for path, text in skill.files().items():
            if path.name != MAIN:
                assert (folder / path).read_text() == text
        assert head_of((folder / skill.name / MAIN).read_text())["name"] == skill.name
    assert {path.name for path in folder.iterdir()} == {*(skill.name for skill in shipped_skills()), RECORD}


def test_versions_of_packages_are_in_the_head_and_in_the_record(skills: Here, tmp_path: Path) -> None:
    assert skills("review-a-change", "--target=s") == 0
    record = json.loads((tmp_path / "s" / RECORD).read_text())
    [skill] = [each for each in shipped_skills() if each.name == "review-a-change"]
    assert record["packages"] == {name: installed_version(name) for name in skill.packages}
    head = head_of((tmp_path / "s/review-a-change" / MAIN).read_text())
    assert head["packages"].split() == [f"{name}=={installed_version(name)}" for name in skill.packages]


def test_a_later_version_replaces_what_was_not_changed(
    skills: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert skills("evaluate", "--target=s") == 0
    monkeypatch.setattr(skill_files, "installed_version", lambda name: "9.9")
    assert skills("evaluate", "prepare-data", "--target=s") == 0
    for name in ("evaluate", "prepare-data"):
        assert "forge-run==9.9" in (tmp_path / "s" / name / MAIN).read_text()
    assert {*map(Path, json.loads((tmp_path / "s" / RECORD).read_text())["files"])} == {
        Path("evaluate", MAIN),
        Path("prepare-data", MAIN),
    }


def test_a_file_that_was_changed_is_refused_by_name_and_nothing_is_written(
    skills: Here, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert skills("evaluate", "--target=s") == 0
    mine = tmp_path / "s/evaluate" / MAIN
    mine.write_text(mine.read_text() + "our cluster\n")
    before = (tmp_path / "s" / RECORD).read_bytes()
    monkeypatch.setattr(skill_files, "installed_version", lambda name: "9.9")
    assert skills("--target=s") == 2
    assert str(Path("s/evaluate", MAIN)) in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "s").iterdir() if path.is_dir()] == ["evaluate"]
    assert "our cluster" in mine.read_text()
    assert (tmp_path / "s" / RECORD).read_bytes() == before
    assert skills("prepare-data", "--target=s") == 0, "others can be installed"
    assert skills("evaluate", "--target=s", "--overwrite") == 0
    assert "our cluster" not in mine.read_text()


def test_a_skill_of_that_name_of_somebody_else_is_refused(skills: Here, tmp_path: Path) -> None:
    other = tmp_path / "s/evaluate" / MAIN
    other.parent.mkdir(parents=True)
    other.write_text("not from Forge")
    assert skills("evaluate", "--target=s") == 2
    assert other.read_text() == "not from Forge"


def test_a_damaged_record_is_named(skills: Here, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / RECORD).write_text("{")
    assert skills("evaluate", "--target=s") == 2
    assert str(Path("s", RECORD)) in capsys.readouterr().err


def test_a_misspelt_name_and_a_target_that_cannot_be_made_are_refused(
    skills: Here, tmp_path: Path, capsys: Capture
) -> None:
    assert skills("start-run", "--target=s") == 2
    assert "'start-a-run'" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert skills("evaluate", "--target=file/skills") == 2
    assert str(Path("file/skills")) in capsys.readouterr().err


def test_packages_that_are_not_installed_are_named(
    skills: Here, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skill_files, "installed_version", lambda name: None if "taps" in name else "0.2.0")
    assert skills("look-inside", "evaluate", "--target=s", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == {
        "folder": "s",
        "skills": ["look-inside", "evaluate"],
        "missing": {"look-inside": ["forge-plugin-taps"]},
    }
    assert main(["skills", "list"]) == 0
    assert capsys.readouterr().out.count("not installed: forge-plugin-taps") == 1
