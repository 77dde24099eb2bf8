"""Task files: what is read, and which lines are refused."""

from __future__ import annotations

import json

import pytest

from forge_core.contracts.errors import DataError
from forge_core.contracts.layout import Layout
from forge_plugin_evaluate.tasks import File, Item
from forge_plugin_evaluate.tasks.file import read_items
from forge_testing.refusals import at, check_problems, naming

LINE = {"context": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}


def written(path, *lines):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_text(text, "utf-8")
    return path


def test_a_line_is_an_item(tmp_path):
    path = written(tmp_path / "sums.jsonl", LINE, "", {**LINE, "answer": 1, "id": 7, "context": "a\u2028b"}, "")
    assert read_items(path) == [Item("2 + 2 =", (" 4", " 5"), 0), Item("a\u2028b", (" 4", " 5"), 1)]


def test_a_limit_spreads_items_over_the_file(tmp_path):
    path = written(tmp_path / "sums.jsonl", *({**LINE, "context": str(number)} for number in range(10)))
    assert [item.context for item in File(path=str(path), limit=4).load()] == ["0", "2", "5", "7"]
    assert len(File(path=str(path), limit=40).load()) == 10


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("{", ["JSON", "column 2"]),
        ("[1]", ["list", "object"]),
        ({"context": ""}, ["lacks", "choices and answer"]),
        ({**LINE, "context": 3}, ["context", "number"]),
        ({**LINE, "choices": []}, ["choices", "list"]),
        ({**LINE, "choices": [" a", 3]}, ["choices", "list"]),
        ({**LINE, "choices": [" a", " "]}, ["choice 1", "blank"]),
        ({**LINE, "answer": 2}, ["answer", 2, "0 to 1"]),
        ({**LINE, "answer": -1}, ["answer", -1, "0 to 1"]),
        ({**LINE, "answer": True}, ["answer", True, "0 to 1"]),
        ({**LINE, "answer": " 4"}, ["answer", "' 4'", "0 to 1"]),
    ],
)
def test_a_bad_line_is_named(line, facts, tmp_path, make_job):
    path = written(tmp_path / "bad.jsonl", LINE, line)
    check_problems(File(path=str(path)).problems(make_job(), Layout()), at("path", f"{path}:2", *facts))


def test_many_bad_lines_are_counted(tmp_path):
    path = written(tmp_path / "bad.jsonl", *["{"] * 8)
    with pytest.raises(DataError, match=r"bad.jsonl:1: .*bad.jsonl:5: .*; and 3 more lines$"):
        read_items(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match=naming(f"{tmp_path}/absent.jsonl")):
        read_items(tmp_path / "absent.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b"\xff")
    with pytest.raises(DataError, match=naming("latin.jsonl", "UTF-8")):
        read_items(tmp_path / "latin.jsonl")
    with pytest.raises(DataError, match=naming("empty.jsonl", "no items")):
        read_items(written(tmp_path / "empty.jsonl", ""))
