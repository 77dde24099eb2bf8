"""What a command may write."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from forge_core.contracts.errors import JobError
from forge_kit.tools.outputs import MARK, free_path, new_folder, output_file, unfinished, write_output
from forge_kit.tools.pictures import write_figure
from forge_testing.refusals import refuses


def test_a_folder_with_files_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("# mine")
    with refuses("", f"--out {tmp_path}", "empty"):
        new_folder(tmp_path, "--out")
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]
    assert new_folder(tmp_path / "a/b", "--out").is_dir()


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refuses("", f"--out {tmp_path}/file/store", f"{tmp_path}/file"):
        new_folder(tmp_path / "file/store", "--out")
    too_long = tmp_path / (300 * "x")
    with refuses("", f"--out {too_long}", "name too long"):
        new_folder(too_long, "--out")
    with refuses("", f"--out {too_long}", "name too long"):
        write_output(output_file(too_long, "--out"), "--out", MARK)
    (tmp_path / "x.html").mkdir()
    with refuses("", f"--out {tmp_path}/x.html", "folder"):
        output_file(tmp_path / "x.html", "--out", [".html"])


def test_a_folder_without_the_right_to_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By what `access` says, as root may write everywhere
    monkeypatch.setattr("os.access", lambda place, mode: place != tmp_path)
    with refuses("", f"--out {tmp_path}/a/b"):
        new_folder(tmp_path / "a/b", "--out")
    monkeypatch.setattr("os.access", lambda place, mode: place == tmp_path)
    assert new_folder(tmp_path / "a/b", "--out").is_dir()


def test_a_suffix_of_another_format_is_refused(tmp_path: Path) -> None:
    with refuses("", f"--out {tmp_path}/report.pdf", "'.pdf'", ".html", ".md"):
        output_file(tmp_path / "report.pdf", "--out", [".html", ".md"])


def test_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert new_folder(Path("~/acts"), "--out") == tmp_path / "acts"
    assert output_file(Path("~/a.PNG"), "--out", [".png"]) == tmp_path / "a.PNG"


def test_only_what_a_command_has_written_is_replaced(tmp_path: Path) -> None:
    for number, content in enumerate(["# mine", "", "x" * (1 << 18)]):
        (path := tmp_path / f"{number}.md").write_text(content)
        with pytest.raises(JobError, match="exists already"):
            output_file(path, "--out", [".md"])
        path.write_text(f"{content}\n<!-- {MARK} -->\n")
        write_output(output_file(path, "--out", [".md"]), "--out", "new")
        assert path.read_text() == "new"


def test_a_link_that_leads_nowhere_is_somebodys(tmp_path: Path) -> None:
    (tmp_path / "a.md").symlink_to(tmp_path / "not there")
    with pytest.raises(JobError, match="exists already"):
        output_file(tmp_path / "a.md", "--out")
    with pytest.raises(JobError, match="exists already"):
        free_path(tmp_path / "a.md", "--out")


def test_what_fails_half_way_leaves_nothing_and_takes_nothing_away(tmp_path: Path) -> None:
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp/mine").touch()
    with suppress(KeyError), unfinished(tmp_path / "out", "--out") as aside:
        aside.mkdir()
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["out.tmp"]
    with unfinished(tmp_path / "out", "--out") as aside:
        aside.mkdir()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.tmp"}
    assert (tmp_path / "out.tmp/mine").exists()
    with pytest.raises(JobError, match="exists already"), unfinished(tmp_path / "out", "--out"):
        pass


def test_a_picture_may_be_drawn_again(tmp_path: Path) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    for form in ("png", "svg", "pdf"):
        for _ in range(2):
            path = output_file(tmp_path / f"new/a.{form}", "--out")
            write_figure(figure_module.Figure(figsize=(1, 1)), path, form)
