"""Which files paths, folders and globs stand for, and what a user is told when they lead to nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from attrs import frozen

from forge_core import load_job
from forge_plugin_text import CorpusDataset, Text, TextFile, find_files
from forge_plugin_text.listing import format_of, left_out
from forge_testing import TINY_JOB
from forge_testing.refusals import at, check_problems, refuses

KNOWN = (".txt", ".py", ".md", ".jsonl", ".gz", ".zst")


def write(*names: str, text: str = "some text") -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


def names(*patterns: str) -> list[str]:
    return [file.name for file in find_files(patterns)]


def test_a_folder_gives_its_files_of_known_formats_at_any_depth_sorted_by_name(here: Path) -> None:
    write("data/b.txt", "data/a/z.md", "data/a/c.jsonl.zst", "data/d.py.gz", "data/picture.png", "data/notes.rst")
    assert names("data") == ["data/a/c.jsonl.zst", "data/a/z.md", "data/b.txt", "data/d.py.gz"]


def test_hidden_files_and_folders_of_a_folder_are_left_out(here: Path) -> None:
    write("data/a.txt", "data/.b.txt", "data/.git/c.txt")
    assert names("data") == ["data/a.txt"]


def test_a_glob_gives_what_it_matches_and_enters_folders(here: Path) -> None:
    write("data/x1.txt", "data/x2/a.txt", "data/y.txt", "data/x3.csv")
    assert names("data/x*") == ["data/x1.txt", "data/x2/a.txt"]
    assert names("data/**/*.txt") == ["data/x1.txt", "data/x2/a.txt", "data/y.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(here: Path) -> None:
    write("a[1].txt", "a1.txt")
    assert names("a[1].txt") == ["a[1].txt"]


def test_the_order_of_patterns_and_how_they_are_spelt_do_not_matter(here: Path) -> None:
    write("b.txt", "a/a.txt")
    assert names("./b.txt", "a/") == names("a", "b.txt") == ["a/a.txt", "b.txt"]


def test_a_file_that_is_reached_several_ways_counts_once(here: Path) -> None:
    write("data/b.txt")
    Path("data/a.txt").symlink_to("b.txt")
    assert names("data", "data/*.txt", str(here / "data/b.txt")) == [str(here / "data/b.txt")]
    assert names("data") == ["data/a.txt"]


def test_linked_folders_are_entered_and_cycles_end(here: Path) -> None:
    write("elsewhere/a.txt", "data/b.txt")
    Path("data/linked").symlink_to(here / "elsewhere")
    Path("data/cycle").symlink_to(here / "data")
    assert names("data") == ["data/b.txt", "data/linked/a.txt"]


@pytest.mark.parametrize(
    ("path", "format_"),
    [("a.TXT", ".txt"), ("a.jsonl.gz", ".jsonl"), ("a.md.zst", ".md"), ("a.gz", ""), ("a.csv.gz", ""), ("txt", "")],
)
def test_the_format_is_told_by_the_suffix_below_the_compression(path: str, format_: str) -> None:
    assert format_of(path) == format_


@pytest.mark.parametrize(
    ("path", "facts"),
    [
        ("missing.txt", ["'missing.txt'", "exist", "{here}"]),
        ("m/*.txt", ["'m/*.txt'", "matches", "{here}"]),
        ("a.csv", ["'a.csv'", "1 files", *KNOWN]),
        ("*.csv", ["'*.csv'", "2 files", "'a.csv'", *KNOWN]),
        ("bare", ["'bare'", "no data", "{here}"]),
        ("", ["''"]),
        ((), ["()"]),
        ("empty.txt", ["1 files", "0 bytes", "'empty.txt'"]),
    ],
)
def test_a_path_that_leads_to_no_text_is_a_problem(here: Path, problems, path: str, facts: list[str]) -> None:
    write("a.csv", "b.csv")
    write("empty.txt", text="")
    Path("bare").mkdir()
    check_problems(problems(Text(path=path)), at("path", *(fact.format(here=os.getcwd()) for fact in facts)))


def test_every_wrong_path_of_a_list_is_reported(here: Path, problems) -> None:
    write("right.txt")
    found = problems(Text(path=("one.txt", "right.txt", "two.txt")))
    check_problems(found, at("path", "'one.txt'"), at("path", "'two.txt'"))


def test_building_without_a_check_raises_the_same_problem(here: Path, make_context) -> None:
    with refuses("path", "'missing.txt'"):
        Text(path="missing.txt").build(make_context())


def test_a_dataset_of_its_own_files_needs_only_to_name_them(here: Path, make_context) -> None:
    @frozen(kw_only=True)
    class Notes(CorpusDataset):
        """All notes."""

        def files(self) -> tuple[TextFile, ...]:
            return tuple(find_files(["**/notes.md"]))

    write("a/notes.md", "b/notes.md", "b/other.md", text="some notes")
    assert len(Notes(held_out_every=2).build(make_context()).held_out) == 11


def test_runs_pipes_and_broken_links_are_left_out_and_counted(here: Path) -> None:
    write("a.txt", "runs/first/plan.txt", "runs/first/job.toml", "runs/first/provenance.json", "runs/first/taps/b.txt")
    Path("gone.txt").symlink_to("nothing")
    Path("loop").symlink_to(".")
    os.mkfifo("pipe.txt")
    assert names(".") == names("**/*.txt") == ["a.txt"]
    assert left_out(["."]) == {"broken links": 1, "pipes, sockets or devices": 1, "run folders": 1}
    with refuses("", "'gone.txt'", "exist"):
        names("gone.txt")
    with refuses("", "'pipe.txt'", "pipe"):
        names("pipe.txt")


def test_files_of_other_formats_are_counted_by_suffix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.pdf", "c.pdf", "LICENSE", ".hidden.pdf"):
        (tmp_path / name).touch()
    assert left_out(["."]) == {"files of other formats (.pdf 2, no suffix 1)": 3}
    assert left_out(["a.txt"]) == {}


JOB = TINY_JOB.replace('type = "forge_testing:Numbers"', 'type = "text"\npath = "data"')


def test_a_path_that_is_beside_the_job_file_and_not_here_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs" / "data").mkdir(parents=True)
    (tmp_path / "jobs" / "data" / "a.txt").write_text("some text")
    (tmp_path / "jobs" / "job.toml").write_text(f'{JOB}[data.tokenizer]\ntype = "bytes"\n')
    with refuses("data.sources.0.path", "'data'", "jobs/data"):
        load_job("jobs/job.toml")
    with refuses("data.sources.0.path") as caught:  # a flag belongs to the folder in which it is written
        load_job("jobs/job.toml", overrides=["data.sources.0.path=data"])
    assert "jobs/data" not in caught.value.problems[0].message
    monkeypatch.chdir(tmp_path / "jobs")
    assert load_job("job.toml").data.sources[0].path == "data"


def test_an_empty_path_is_not_taken_for_the_folder_of_the_job_file(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    empty = JOB.replace('path = "data"', 'path = ""')
    (tmp_path / "jobs" / "job.toml").write_text(f'{empty}[data.tokenizer]\ntype = "bytes"\n')
    with refuses("data.sources.0.path", "''") as caught:
        load_job("jobs/job.toml")
    assert "jobs" not in caught.value.problems[0].message
