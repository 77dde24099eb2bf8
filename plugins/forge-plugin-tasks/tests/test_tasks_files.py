"""Task files: what is read, and which lines are refused."""

from __future__ import annotations

import json

import pytest

from forge_core.contracts.errors import DataError
from forge_core.contracts.layout import Layout
from forge_plugin_tasks import File, Item
from forge_plugin_tasks.file import read_items

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
    ("line", "message"),
    [
        ("{", "is not JSON: Expecting property name enclosed in double quotes at column 2"),
        ("[1]", "is a list, not an object with context, choices and answer"),
        ({"context": ""}, "lacks choices and answer"),
        ({**LINE, "context": 3}, "context is a number, not text"),
        ({**LINE, "choices": []}, "choices is not a list of at least one text"),
        ({**LINE, "choices": [" a", 3]}, "choices is not a list of at least one text"),
        ({**LINE, "choices": [" a", " "]}, "choice 1 is blank"),
        ({**LINE, "answer": 2}, "answer is 2, not a number from 0 to 1"),
        ({**LINE, "answer": -1}, "answer is -1, not a number from 0 to 1"),
        ({**LINE, "answer": True}, "answer is True, not a number from 0 to 1"),
        ({**LINE, "answer": " 4"}, "answer is ' 4', not a number from 0 to 1"),
    ],
)
def test_a_bad_line_is_named(line, message, tmp_path, make_job):
    path = written(tmp_path / "bad.jsonl", LINE, line)
    (problem,) = File(path=str(path)).problems(make_job(), Layout())
    assert problem.path == "path"
    assert problem.message == f"{path}:2: {message}"


def test_many_bad_lines_are_counted(tmp_path):
    path = written(tmp_path / "bad.jsonl", *["{"] * 8)
    with pytest.raises(DataError, match=r"bad.jsonl:1: .*bad.jsonl:5: .*; and 3 more lines$"):
        read_items(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match=r"absent.jsonl does not exist"):
        read_items(tmp_path / "absent.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"latin.jsonl cannot be read: it is not UTF-8"):
        read_items(tmp_path / "latin.jsonl")
    with pytest.raises(DataError, match="has no items"):
        read_items(written(tmp_path / "empty.jsonl", ""))
