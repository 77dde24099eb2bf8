"""Held-out documents: how they are chosen, and that training never sees them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_plugin_text import Text
from forge_plugin_text.reading import Document
from forge_plugin_text.split import Split
from forge_testing.refusals import at, check_problems, naming, refuses


@pytest.fixture
def letters(here: Path) -> Path:
    """Ten documents, `a.txt` to `j.txt`, each of its own letter."""
    for letter in "abcdefghij":
        (here / f"{letter}.txt").write_text(letter)
    return here


def held_out(component: Text) -> list[str]:
    return [document.name for document, held_out in component.corpus().documents() if held_out]


def write_list(*lines: str) -> str:
    Path("held_out.list").write_text("\n".join(lines))
    return "held_out.list"


def test_nothing_is_held_out_by_default(letters: Path) -> None:
    assert held_out(Text(path=".")) == []


def test_every_nth_document_is_held_out_starting_with_the_first(letters: Path) -> None:
    assert held_out(Text(path=".", held_out_every=4)) == ["a.txt", "e.txt", "i.txt"]


def test_a_list_names_documents_and_may_have_comments_and_names_that_do_not_exist(letters: Path) -> None:
    list_ = write_list("# chosen by hand", "", "c.txt", "  b.txt  ", "from_another_version.txt")
    assert held_out(Text(path=".", held_out_list=list_)) == ["b.txt", "c.txt"]


def test_a_list_names_single_lines_of_jsonl_or_the_whole_file(here: Path) -> None:
    for name in ("a", "b"):
        Path(f"{name}.jsonl").write_text("\n".join(json.dumps({"text": f"{name}{n}"}) for n in range(3)))
    assert held_out(Text(path=".", held_out_list=write_list("a.jsonl:2"))) == ["a.jsonl:2"]
    assert held_out(Text(path=".", held_out_list=write_list("b.jsonl"))) == ["b.jsonl:1", "b.jsonl:2", "b.jsonl:3"]


def test_documents_are_the_texts_of_the_training_split_only(letters: Path) -> None:
    assert "".join(Text(path=".", held_out_every=5).documents()) == "bcdeghij"


@given(
    names=st.lists(st.text("abc", min_size=1, max_size=3), unique=True),
    split=st.builds(Split, st.sampled_from([0, 2, 3, 7])) | st.builds(Split, names=st.frozensets(st.text("abc"))),
)
def test_a_document_is_either_held_out_or_not_whatever_else_is_asked(names: list[str], split: Split) -> None:
    documents = [Document(name, name, "") for name in names]
    chosen = [document.name for number, document in enumerate(documents) if split.holds_out(number, document)]
    if split.every:
        assert chosen == names[:: split.every]
    else:
        assert set(chosen) == set(names) & split.names


@pytest.mark.parametrize("every", [1, -3])
def test_every_first_or_a_negative_number_is_refused(every: int) -> None:
    with pytest.raises(ValueError, match=naming("'held_out_every'", 0, 2, every)):
        Text(path=".", held_out_every=every)


def test_both_ways_at_once_are_a_problem(letters: Path, problems) -> None:
    component = Text(path="*.txt", held_out_every=20, held_out_list=write_list("a.txt"))
    check_problems(problems(component), at("held_out_list", "held_out_every = 20"))
    with refuses("held_out_list", "held_out_every = 20"):
        component.corpus()


@pytest.mark.parametrize(
    ("lines", "facts"),
    [
        (["# nothing yet"], ["'held_out.list'", "no document"]),
        (["data/b.txt", "data/a.txt"], ["'held_out.list'", "2 names", "'data/a.txt'", "'a.txt'"]),
    ],
)
def test_a_list_that_holds_out_nothing_is_a_problem(
    letters: Path, problems, lines: list[str], facts: list[str]
) -> None:
    check_problems(problems(Text(path="*.txt", held_out_list=write_list(*lines))), at("held_out_list", *facts))


def test_a_list_that_does_not_exist_is_a_problem(letters: Path, problems) -> None:
    found = problems(Text(path="*.txt", held_out_list="gone.list"))
    check_problems(found, at("held_out_list", "'gone.list'", "No such file or directory"))


def test_a_list_that_is_no_text_is_a_problem(letters: Path, problems) -> None:
    Path("held_out.list").write_bytes(b"\xff\xfe")
    found = problems(Text(path="*.txt", held_out_list="held_out.list"))
    check_problems(found, at("held_out_list", "'held_out.list'", "utf-8"))


def test_a_single_document_cannot_be_split(letters: Path, problems) -> None:
    found = problems(Text(path="a.txt", held_out_every=20))
    check_problems(found, at("held_out_every", 20, "single document", "held_out_every = 0"))


@pytest.mark.parametrize(
    ("lines", "single"),
    [('{"text": "one"}\n', True), ('{"text": "one"}\n{"text": "two"}\n', False), ("no JSON", False)],
)
def test_json_lines_of_one_document_are_a_single_one(letters: Path, problems, lines: str, single: bool) -> None:
    (letters / "log.jsonl").write_text(lines)
    assert [problem.path for problem in problems(Text(path="log.jsonl", held_out_every=20))] == (
        ["held_out_every"] if single else []
    )


def test_a_line_that_the_file_does_not_have_is_found_when_the_corpus_is_read(here: Path, make_context) -> None:
    Path("a.jsonl").write_text('{"text": "a line of some length"}')
    with refuses("", "'a.jsonl'", "hold out"):
        Text(path="a.jsonl", held_out_list=write_list("a.jsonl:99")).build(make_context())


def test_text_without_a_tokenizer_is_a_problem(letters: Path, make_context) -> None:
    job = make_context().job
    job.data.tokenizer = None
    check_problems(Text(path=".").problems(job, None), at("", "[data.tokenizer]", 'type = "bpe"'))
    with refuses("", "[data.tokenizer]"):
        Text(path=".").build(SimpleNamespace(job=job, tokenizer=None, mesh=None))
