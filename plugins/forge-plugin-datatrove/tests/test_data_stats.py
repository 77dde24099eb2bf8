"""`forge-run data stats`: figures of documents before and after other commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from cleaning_files import Command, write_lines, write_table

from forge_core.cli import main

TABLE = """
tasks = 2
[[filter]]
type = "regex"
regex_exp = "^short"
[[stats]]
type = "documents"
[[stats]]
type = "lines"
"""


def test_sources_stand_next_to_each_other(folder: Path, data: Command, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["short", "short too", "a longer text\nof two lines", "the longest text\nhas\nthree lines"]
    write_lines(folder / "in/a.jsonl", [{"text": text} for text in texts])
    write_table(folder, TABLE)
    before = data("stats")
    assert before["documents"] == 4
    length = before["statistics"]["length"]
    lengths = [len(text) for text in texts]
    assert (length["total"], length["mean"]) == (sum(lengths), sum(lengths) / 4)
    assert (length["min"], length["max"]) == (min(lengths), max(lengths))
    assert before["statistics"]["n_lines"]["mean"] == 7 / 4
    assert "out/filter is not finished" in data("stats", "--of", "filter", code=2)
    assert main(["data", "filter", "clean.toml"]) == 0
    assert "filter: 1 file; logs in" in capsys.readouterr().err
    assert data("stats", "--of", "filter")["statistics"]["n_lines"]["mean"] == 5 / 2
    assert main(["data", "stats", "clean.toml"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [["mean", "inputs", "filter"], ["documents", "4", "2"]]
    assert ["n_lines", "1.75", "2.5"] in lines


def test_a_tokenizer_that_would_be_fetched_is_refused(folder: Path, data: Command) -> None:
    write_lines(folder / "in/a.jsonl", [{"text": "a"}])
    write_table(folder, '[[stats]]\ntype = "tokens"\n')
    message = data("stats", code=2)
    assert "stats.0: tokens would fetch the tokenizer 'gpt2', which is no file here; put the file there" in message
