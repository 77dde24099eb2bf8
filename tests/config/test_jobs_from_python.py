"""Jobs made in Python: dicts and texts beside files, and overrides as a dict."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core import JobError, Trainer, dump_job, load_job
from forge_testing import TINY_JOB
from forge_testing.refusals import ExpectedProblem, at, check_problems, naming, refuses

TABLE = {
    "train": {"steps": 4, "global_batch_size": 4, "seq_len": 8},
    "model": {"type": "forge_testing:TinyModel"},
    "data": {"sources": [{"type": "forge_testing:Numbers"}]},
    "optimizer": {"type": "forge_testing:TinyAdamW"},
}
"""`TINY_JOB`, as a dict."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(TINY_JOB)
    return path


def test_a_file_a_text_and_a_dict_are_the_same_job(file: Path) -> None:
    assert load_job(file) == load_job(str(file)) == load_job(TINY_JOB) == load_job(TABLE)


def test_layers_may_be_of_each_sort_and_later_ones_win(file: Path) -> None:
    job = load_job(file, {"train": {"steps": 5}}, "[train]\nseq_len = 16", overrides={"train.global_batch_size": 2})
    assert (job.train.steps, job.train.seq_len, job.train.global_batch_size) == (5, 16, 2)


def test_overrides_are_flags_or_a_dict_of_values(file: Path) -> None:
    flags = load_job(file, overrides=["optimizer.lr=0.5", "--data.sources.0.weight=2", "job.name=mine"])
    assert load_job(file, overrides={"optimizer.lr": 0.5, "data.sources.0.weight": 2.0, "job.name": "mine"}) == flags
    assert load_job(file, overrides="train.steps=7").train.steps == 7


def test_tuples_and_paths_of_python_are_arrays_and_strings(tmp_path: Path) -> None:
    table = TABLE | {"data": {"sources": tuple(TABLE["data"]["sources"])}, "job": {"output": tmp_path}}
    assert load_job(table).job.output == str(tmp_path)


def test_what_is_made_in_python_is_written_like_any_job() -> None:
    assert load_job(dump_job(load_job(TABLE))) == load_job(TABLE)


@pytest.mark.parametrize(
    ("source", "overrides", "expected"),
    [
        ({**TABLE, "eval": {"interval": "4"}}, (), at("eval.interval", "int", "str '4'", "write 4", origin="table")),
        (TINY_JOB.replace("steps", "stepz"), (), at("train.stepz", "'steps'", origin="text:3")),
        ("[train\nsteps = 4", (), at("", "TOML", "]", origin="text:1:7")),
        (TABLE, {"train.steps": 0}, at("train.steps", "> 0", "got 0", origin="train.steps")),
        (TABLE, {"train..steps": 1}, at("", "'train..steps'", "--section.key=value", origin="train..steps")),
    ],
    ids=str,
)
def test_mistakes_name_where_they_were_made(source: object, overrides: object, expected: ExpectedProblem) -> None:
    with pytest.raises(JobError) as caught:
        load_job(source, overrides=overrides)
    [problem] = [problem for problem in caught.value.problems if problem.path == expected.path]
    check_problems([problem], expected)


def test_a_text_of_one_line_is_taken_for_a_path() -> None:
    with refuses("", "line break", origin="train = {steps = 4}"):
        load_job("train = {steps = 4}")


@pytest.mark.parametrize("wrong", [3, None, [TABLE], ["a.toml"]])
def test_other_types_get_a_sentence(wrong: object) -> None:
    types = naming("path", "TOML", "table", f"not {type(wrong).__name__}")
    with pytest.raises(TypeError, match=types):
        load_job(wrong)
    with pytest.raises(TypeError, match=types):
        Trainer(wrong)


class TestTrainer:
    def test_takes_what_load_job_takes(self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert Trainer("job.toml").job == Trainer(file).job == Trainer(TABLE).job == Trainer(load_job(file)).job
        assert Trainer({**TABLE, "job": {"name": "from-python"}}, echo=lambda text: None).run().step == 4

    def test_a_missing_file_is_an_error_of_the_job(self, file: Path) -> None:
        with refuses("", f"'{file}'", origin=str(file.with_name("jobb.toml"))):
            Trainer(file.with_name("jobb.toml"))

    @pytest.mark.parametrize("hooks", [["x"], "x", [dict], [None]])
    def test_hooks_that_are_none_get_a_sentence(self, hooks: object) -> None:
        with pytest.raises(TypeError, match=naming("hooks", "TrainingHook")):
            Trainer(TABLE, hooks=hooks)
