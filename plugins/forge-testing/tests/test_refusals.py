"""Assertions on refusals fail for another path, for a fact that is not named, and for a problem too few or too many."""

from __future__ import annotations

import re

import pytest

from forge_core.contracts.errors import JobError, PluginError, Problem
from forge_testing import TinyModel, tiny_job
from forge_testing.refusals import at, check_problems, lacks, naming, problems_of, refuses, refuses_all

DIM = Problem("model.dim", "30 is not divisible by model.heads = 4", "job.toml:3")
RATE = Problem("optimizer.lr", "must be above 0, not -1.5")


def raises(*problems, error=JobError):
    raise error(problems)


def test_a_refusal_has_a_path_facts_and_an_origin():
    with refuses("model.dim", 30, "model.heads", origin="job.toml:3") as caught:
        raises(DIM)
    assert caught.value.problems == [DIM]


def test_a_problem_of_no_key_has_an_empty_path():
    with refuses("", "job.toml"):
        raise JobError("job.toml: no such file")


@pytest.mark.parametrize(
    "expected",
    [
        at("model"),
        at("model.dim", 3),
        at("model.dim", 4, 31),
        at("model.dim", origin="job.toml:4"),
        at("model.dim", origin=""),
    ],
    ids=str,
)
def test_another_refusal_fails(expected):
    with pytest.raises(pytest.fail.Exception, match=re.escape(str(DIM))):
        check_problems([DIM], expected)
    with pytest.raises(pytest.fail.Exception), refuses(expected.path, *expected.facts, origin=expected.origin):
        raises(DIM)


def test_no_refusal_fails():
    with pytest.raises(pytest.fail.Exception), refuses("model.dim"):
        pass


def test_all_problems_count_in_their_order():
    with refuses_all("model.dim", at("optimizer.lr", -1.5)):
        raises(DIM, RATE)
    for expected in (["optimizer.lr", "model.dim"], ["model.dim"], ["model.dim", "optimizer.lr", "train.steps"]):
        with pytest.raises(pytest.fail.Exception):
            check_problems([DIM, RATE], *expected)


def test_the_class_counts():
    with refuses("model.dim", error=PluginError):
        raises(DIM, error=PluginError)
    with pytest.raises(JobError), refuses("model.dim", error=PluginError):
        raises(DIM)


@pytest.mark.parametrize(
    ("fact", "text"),
    [
        (3, "3 steps"),
        (3, "step-3, and"),
        (3, "after 3."),
        (0, "data.sources.0.path"),
        (0.5, "(0.5)"),
        (-1, "lr=-1"),
        ("lr", "'lr' is"),
        ("a.txt", "/tmp/a.txt: gone"),
        ("--out", "set --out"),
        ("a\nb", "a\nb"),
    ],
)
def test_facts_are_found(fact, text):
    assert not lacks(text, fact)
    assert re.search(naming(fact), f"first line\n{text}")


@pytest.mark.parametrize(
    ("fact", "text"),
    [
        (3, "13 steps of 33, 0.3, 3.5, 3,000 and 2,3"),
        (3, "step3"),
        ("lr", "lr_factor and clr"),
        ("a.txt", "aa.txt and a-txt"),
        ("step-3", "step-30"),
        ("LR", "lr"),
    ],
)
def test_parts_of_other_facts_are_not_found(fact, text):
    assert lacks(text, "and", fact)[-1] == str(fact)
    assert not re.search(naming(fact), text)


def test_all_facts_are_wanted_in_any_order():
    assert re.search(naming("b", 1), "1\nb")
    assert not re.search(naming("b", 1), "2\nb")
    assert lacks("1 b", "b", 1, 2, "c") == ["2", "c"]


@pytest.mark.parametrize("facts", [[], [""], ["a", ""]], ids=str)
def test_an_expectation_that_cannot_fail_is_refused(facts):
    with pytest.raises(ValueError, match="any text would fit"):
        naming(*facts)


def test_problems_of_a_job_have_paths(tmp_path):
    job = tiny_job(str(tmp_path), model=TinyModel(), global_batch_size=3)
    check_problems(problems_of(job, ranks=2), at("train.global_batch_size", 3, 2))
    check_problems(problems_of(job))
