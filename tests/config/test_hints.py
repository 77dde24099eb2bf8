"""What users of other programs probably meant: slips of TOML, keys of other trainers, names of commands and options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forge_core import load_job
from forge_core.cli import main
from forge_core.config.tree import hints, read_job
from forge_core.contracts.errors import ExitCode, JobError, Problem
from forge_core.plugins.catalog import Catalog, first_party

Problems = Callable[..., list[Problem]]

SLIPS = {
    "x = “adamw”": "typographic quotes",
    "x = True": "true or false",
    "x = None": "leave the key out",
    "x = .001": "before the point",
    "x = [.9, .95]": "before the point",
    "x = 1.": "after the point",
    "x = 1,000": "without commas",
    "x = 007": "leading zeros",
    "x = 2*3": "write the result",
    "x = 10m": "no unit",
    'x = "C:\\Users\\me"': "begins an escape",
    "// note": "begin with #",
    "[train": "ends with ]",
    "[[data.sources]": "ends with ]]",
    'x = "adamw': "closing quote",
    "x = adamw": "needs quotes",
    "x = ~/data": "needs quotes",
    "x = [adamw]": "needs quotes",
    "x = ": "value after =",
    "x: 3": "with =",
    "x 3": "with =",
    "learning rate = 3": "no spaces",
}


@pytest.mark.parametrize("line", SLIPS)
def test_a_slip_of_toml_is_answered_by_what_was_probably_meant(line: str) -> None:
    with pytest.raises(JobError) as caught:
        read_job([f"seed = 1\n{line}\n"])
    [problem] = caught.value.problems
    assert problem.origin.startswith("text:2:")
    assert SLIPS[line] in problem.message


def test_every_rule_about_toml_has_a_slip() -> None:
    assert [hint for _, hint in hints("syntax")["rules"] if not any(part in hint for part in SLIPS.values())] == []


def test_what_nobody_foresaw_keeps_the_parsers_words() -> None:
    with pytest.raises(JobError) as caught:
        read_job(["x = [1, 2\n"])
    assert str(caught.value).endswith("unclosed array")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_a_file_of_powershell_is_named_as_utf_16(encoding: str, tmp_path: Path) -> None:
    text = "[train]\n" if encoding == "utf-16" else "\ufeff[train]\n"
    (tmp_path / "job.toml").write_bytes(text.encode(encoding))
    with pytest.raises(JobError, match="UTF-16"):
        read_job([tmp_path / "job.toml"])


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("optimizer.learning_rate", "optimizer.lr"),
        ("train.epochs", "no key: training lasts train.steps"),
        ("train.gradient_accumulation_steps", "no key: it follows from train.global_batch_size"),
        ("train.batch_size", "train.global_batch_size"),
        ("data.num_workers", "data.workers"),
        ("checkpoint.save_total_limit", "checkpoint.keep"),
        ("optimizer.r", "[plugins.lora] rank"),
        ("optimizer.task_type", "no key: the loss decides what is learned"),
        ("optimizer.lora_bias", "no key: adapters have no bias"),
    ],
)
def test_a_key_of_another_trainer_is_answered_by_its_name_here(key: str, answer: str, problems: Problems) -> None:
    [problem] = problems("", f"--{key}=1")
    assert problem.path == key
    assert f"unknown key; in Forge it is {answer}" in problem.message


def test_a_missing_key_comes_before_one_that_is_spelt_alike(small_catalog: Catalog) -> None:
    with pytest.raises(JobError) as caught:
        load_job({"train": {"steps": 1, "seq_len": 8, "batch_size": 8}}, catalog=small_catalog)
    [message] = [each.message for each in caught.value.problems if each.path == "train.batch_size"]
    assert message == "unknown key; did you mean 'global_batch_size'?"


def test_every_hint_about_commands_names_one_that_there_is() -> None:
    commands = first_party()["command"].keys() | {"run"}
    for name, hint in hints("commands").items():
        assert name not in commands
        quoted = [each.split() for each in hint.split("'")[1::2]]
        assert all(words[0] in commands or " ".join(words[:2]) in commands for words in quoted), hint


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["ls"], "'ls' is no command and no job file; did you mean 'runs'?"),
        (["export"], "did you mean 'weights export RUN'?"),
        (["-", "--nproc=2"], "standard input can be read once; write the job to a file"),
        (["run", "--gpus", "2"], "--gpus: unknown option; in Forge it is --nproc"),
        (["run", "--learning_rate=3e-4"], "in Forge it is optimizer.lr"),
    ],
)
def test_commands_and_options_of_other_programs(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == ExitCode.BAD_JOB
    assert answer in capsys.readouterr().err
