"""Command lines with files, keys of a job and options of their own."""

from __future__ import annotations

import argparse

import pytest

from forge_core.cli.command_line import parse_job_arguments


@pytest.mark.parametrize(
    ("words", "files", "overrides"),
    [
        (["job.toml", "--parallel.fsdp"], ["job.toml"], ["--parallel.fsdp={}"]),
        (["--parallel.fsdp=true", "job.toml"], ["job.toml"], ["--parallel.fsdp={}"]),
        (
            ["--plugins.cpu_products", "job", "--parallel.tp.degree", "2"],
            ["job"],
            ["--plugins.cpu_products={}", "--parallel.tp.degree=2"],
        ),
        (["job", "--parallel.fsdp", "{shard = 2}"], ["job"], ["--parallel.fsdp={shard = 2}"]),
        (["job", "--train.precision", "bf16"], ["job"], ["--train.precision=bf16"]),
        (["job", "train.steps=3"], ["job"], ["--train.steps=3"]),
    ],
)
def test_overrides_stand_anywhere_and_a_table_alone_is_switched_on(words, files, overrides):
    _, *parsed = parse_job_arguments(argparse.ArgumentParser(), words)
    assert parsed == [files, overrides]


def test_a_command_with_an_argument_of_its_own_has_no_files():
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    options, files, overrides = parse_job_arguments(parser, ["--parallel.fsdp", "runs/large"])
    assert (options.run, files, overrides) == ("runs/large", [], ["--parallel.fsdp={}"])
