"""`forge-run data decontaminate`: texts of the tasks that a job evaluates, and the report of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cleaning_files import Command, lines_of, write_lines, write_table

from forge_core.cli import main
from forge_core.config.load import dump_job, load_job

QUESTION = "Which of the four rivers of the old kingdom carries the most water in the first weeks of spring?"
ANSWER = " It is the northern one, since snow in the hills melts before the rains of the south have begun to fall."
JOB = """
[train]
steps = 1
global_batch_size = 2
seq_len = 64
[model]
type = "forge_testing:TinyModel"
[optimizer]
type = "forge_testing:TinyAdamW"
[data.tokenizer]
type = "bytes"
[[data.sources]]
type = "text"
path = "{path}"
[evaluations.held_out]
[evaluations.rivers]
type = "tasks"
too_long = "leave_out"
tasks = [{{ type = "file", path = "tasks/rivers.jsonl" }}, {{ type = "copy" }}]
"""


@pytest.fixture
def inputs(folder: Path) -> Path:
    """Documents, two of which have a part of an item: one of its answer, one across question and answer."""
    items = [
        {"context": QUESTION, "choices": [ANSWER, " It is not known."], "answer": 0},
        {"context": "Short?", "choices": [" yes", " no"], "answer": 1},
    ]
    write_lines(folder / "tasks/rivers.jsonl", items)
    texts = {
        "clean": "A text about rivers, of the old kingdom and of others, with no ten words of an item in a row.",
        "answer": "An older text: snow IN THE HILLS melts before the rains of the south have begun to fall, it says",
        "across": "first weeks of spring? It is the northern one, since snow in the mountains is rare.",
        "question": f"{QUESTION} Nobody knows.",
    }
    write_lines(folder / "in/a.jsonl", [{"id": id_, "text": text} for id_, text in texts.items()])
    (folder / "job.toml").write_text(JOB.format(path="in"))
    return folder


def test_documents_with_texts_of_the_jobs_tasks_are_removed_with_task_and_n_gram(
    inputs: Path, data: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    write_table(inputs, 'tasks = 2\n[decontaminate]\njob = "job.toml"\nn_grams = 10\n')
    summary = data("decontaminate")
    removed = {each["id"]: each for each in lines_of(inputs / "out/decontaminate/removed")}
    assert {*removed} == {"answer", "across"}
    assert {each["contaminated_task"] for each in removed.values()} == {"rivers"}
    assert removed["answer"]["contaminated_ngram"] == "snow in the hills melts before the rains of the"
    assert removed["across"]["contaminated_ngram"] == "first weeks of spring it is the northern one since"
    overlap = json.loads((inputs / "out/decontaminate/overlap.json").read_text())
    assert overlap["tasks"] == summary["tasks"]
    rivers = summary["tasks"]["rivers"]
    # 21 words of the answer have 12 n-grams, and 9 begin in the question
    assert rivers == {"items": 2, "short_items": 1, "n_grams": 21, "documents": 2, "n_grams_found": 2}
    assert summary["tasks"]["copy"]["items"] > 0
    assert main(["data", "decontaminate", "clean.toml"]) == 0
    assert "rivers  2      1          21       2          2" in capsys.readouterr().out


def test_n_grams_of_questions_alone_by_an_option_of_datatrove(inputs: Path, data: Command) -> None:
    table = "tasks = 1\n[decontaminate]\nn_grams = 10\nfind_query_ngrams = true\n"
    write_table(inputs, table + '[[decontaminate.tasks]]\ntype = "file"\npath = "tasks/rivers.jsonl"\nname = "mine"\n')
    data("decontaminate")
    removed = {each["id"]: each["contaminated_task"] for each in lines_of(inputs / "out/decontaminate/removed")}
    assert removed == {"answer": "mine", "across": "mine", "question": "mine"}


def test_changed_items_are_other_arguments(inputs: Path, data: Command) -> None:
    write_table(inputs, 'tasks = 1\n[decontaminate]\njob = "job.toml"\nn_grams = 10\n')
    data("decontaminate")
    write_lines(inputs / "tasks/rivers.jsonl", [{"context": "", "choices": [ANSWER], "answer": 0}])
    assert "out/decontaminate was begun with other arguments" in data("decontaminate", code=2)


def test_problems_name_what_is_missing(inputs: Path, data: Command) -> None:
    write_table(inputs, "[decontaminate]\nn_gram = 3\n")
    assert "clean.toml:5: decontaminate.n_gram: unknown key; did you mean 'n_grams'?" in data("decontaminate", code=2)
    write_table(inputs, "[decontaminate]\nn_grams = 3\n")
    assert "there is no job, and there is no [[decontaminate.tasks]]" in data("decontaminate", code=2)
    (inputs / "job.toml").write_text(JOB.format(path="in").partition("[evaluations.rivers]")[0])
    write_table(inputs, '[decontaminate]\njob = "job.toml"\n')
    assert "job.toml evaluates no tasks ([evaluations.NAME] of type tasks)" in data("decontaminate", code=2)


@pytest.mark.parametrize("prepared", [False, True], ids=["documents", "tokens"])
def test_the_report_of_a_run_on_the_documents_has_the_overlap(
    prepared: bool, inputs: Path, data: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    write_table(inputs, 'tasks = 1\n[decontaminate]\njob = "job.toml"\nn_grams = 10\n')
    data("decontaminate")
    job = JOB.format(path="out/decontaminate/documents")
    if prepared:
        documents = "out/decontaminate/documents"
        assert main(["data", "prepare", documents, "--out", "tokens", "--tokenizer", "bytes"]) == 0
        job = JOB.format(path="tokens").replace('type = "text"', 'type = "memmap"')
    # Another task is evaluated than what was searched for
    job = job.replace('{ type = "copy" }', '{ type = "recall" }')
    (inputs / "runs/one").mkdir(parents=True)
    (inputs / "job.toml").write_text(job)
    (inputs / "runs/one/job.toml").write_text(dump_job(load_job("job.toml")))
    (inputs / "runs/one/provenance.json").write_text("{}")
    assert main(["report", "runs/one", "--out", "report.md", "--sections", "contamination"]) == 0
    text = (inputs / "report.md").read_text()
    assert "## Contamination" in text
    assert "| out/decontaminate | rivers | 2 | 1 | 2 | 2 |" in text
    assert "evaluates recall, which no source was searched for" in text
