"""The dataset `prompts`, and lines that cannot be trained on: each is named before the first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from grpo_runs import Even, settings

from forge_core.engine.build import build_context, build_tokenizer
from forge_plugin_grpo import Answer, Completion, Prompts
from forge_plugin_text import Bytes
from forge_testing import tiny_job
from forge_testing.catalogs import installed
from forge_testing.refusals import at, check_problems, problems_of, refuses


def build(folder: Path, text: str, rewards: Any = None, **keys: Any) -> Any:
    """The rows of a file of this text."""
    path = folder / "lines.jsonl"
    path.write_text(text, encoding="utf-8")
    sources = (Prompts(path=str(path), **keys),)
    changes = settings(folder, rewards=rewards or {"even": Even()})
    job = tiny_job(str(folder), installed(), **{**changes, "data": {"sources": sources, "tokenizer": Bytes()}})
    context = build_context(job, installed(), None)
    return job.data.sources[0].build(attrs.evolve(context, tokenizer=build_tokenizer(job, context)))


CHAT = [{"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("", ["lines.jsonl"]),
        ("\n \n", ["lines.jsonl"]),
        ('\n{"prompt": "1"\n', ["line 2"]),
        ('{"question": "1"}', ["line 1", "prompt"]),
        ('{"prompt": ""}', ["line 1"]),
        ('{"prompt": [{"role": "user"}]}', ["line 1", "content"]),
        ('{"prompt": "1"}\n\n{"prompt": "12345678901"}', ["line 3", "11", "8", "train.seq_len"]),
        (json.dumps({"prompt": CHAT}), ["line 1", "chat_template"]),
    ],
)
def test_a_line_without_a_prompt_that_fits_is_named(tmp_path, text, facts):
    with refuses("path", *facts):
        build(tmp_path, text)


def test_a_line_without_the_answer_is_named_with_its_keys(tmp_path):
    with refuses("path", "line 2", "loss.rewards.sum", "answer", "solution"):
        build(tmp_path, '{"prompt": "1", "answer": "1"}\n{"prompt": "2", "solution": "2"}\n', rewards={"sum": Answer()})


def test_the_first_line_is_read_when_the_job_is_checked(tmp_path):
    job = tiny_job(str(tmp_path), installed(), **settings(tmp_path, rewards={"sum": Answer(key="result")}))
    check_problems(problems_of(job), at("data.sources.0.path", "line 1", "loss.rewards.sum", "result", "answer"))


def test_a_file_that_is_held_out_whole_is_refused(tmp_path):
    with refuses("held_out_every", "lines.jsonl"):
        build(tmp_path, '{"prompt": "1"}', held_out_every=2)


def test_a_line_ends_at_a_line_feed_only(tmp_path):
    """JSON has other separators of lines inside of texts, and some programs begin a file with a byte order mark."""
    lines = [{"prompt": "1\u20281"}, {"prompt": "2\x85"}]
    rows = build(tmp_path, "\ufeff" + "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    assert [int(rows[n]["prompt_tokens"]) for n in range(len(rows))] == [5, 3]


@pytest.mark.parametrize("key", ["loss", "tokenizer"])
def test_prompts_need_a_tokenizer_and_a_loss_that_draws_completions(tmp_path, key):
    changes = settings(tmp_path)
    changes["data"]["tokenizer"] = None if key == "tokenizer" else Bytes()
    if key == "loss":
        del changes["loss"]
    assert "data.sources.0" in [
        problem.path for problem in problems_of(tiny_job(str(tmp_path), installed(), **changes))
    ]


def test_other_sources_are_refused(tmp_path):
    changes = settings(tmp_path)
    del changes["data"]["sources"]
    job = tiny_job(str(tmp_path), installed(), **changes)
    check_problems(problems_of(job), at("loss", "data.sources.0", "prompts"))


@pytest.mark.parametrize(
    ("text", "ended", "keys", "score"),
    [
        (" 7 ", True, {}, 1),
        ("7.0", True, {}, 1),
        ("7", False, {}, 0),
        ("8", True, {}, 0),
        ("first #### 3, then #### 7", True, {"pattern": r"#### *(\d+)"}, 1),
        ("7", True, {"pattern": r"#### *(\d+)"}, 0),
        ("or", True, {"pattern": "(x)?or"}, 0),
    ],
)
def test_answers_are_compared(text, ended, keys, score):
    completion = Completion(prompt="3+4=", text=text, ids=[1], ended=ended, row={"answer": "7"})
    assert Answer(**keys).score(completion) == score


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [("1,234", "1234.0", 1), ("nan", "nan", 1), ("Infinity", "inf", 0), ("inf", "1e999", 0)],
)
def test_numbers_are_compared_by_value_and_words_as_texts(text, answer, score):
    completion = Completion(prompt="?", text=text, ids=[1], ended=True, row={"answer": answer})
    assert Answer().score(completion) == score
