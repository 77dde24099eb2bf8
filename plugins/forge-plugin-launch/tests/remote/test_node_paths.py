"""Data that only the nodes of a cluster have: left to the check there, and everything else is checked here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forge_core.cli import main
from forge_testing.refusals import lacks
from forge_testing.tiny import TINY_JOB

JOB = f"""{TINY_JOB.partition("[[data.sources]]")[0]}
[optimizer]
type = "adamw"
[job]
name = "far"
[data.tokenizer]
type = "file"
path = "/scratch/tokenizer.json"
[[data.sources]]
type = "text"
path = ["/scratch/web/*.txt", "/scratch/code"]
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "slurm.toml").write_text('[cluster]\nnode_paths = ["/scratch"]\n')
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["submit", "job.toml", "--on=slurm.toml", *words])
        return (code, *capsys.readouterr())

    return run


def test_files_that_only_nodes_have_are_left_to_them(submit: Run) -> None:
    code, script, err = submit("--print")
    assert code == 0, err
    assert script.startswith("#!/bin/bash")
    assert sorted(err.splitlines()) == [
        "warning: data.sources.0.path: not here, so the nodes check it: /scratch/web/*.txt, /scratch/code",
        "warning: data.tokenizer.path: not here, so the nodes check it: /scratch/tokenizer.json",
    ]


def test_all_else_is_checked_here(submit: Run) -> None:
    code, _, err = submit("--print", "--train.global_batch_size=3", "--train.micro_batch_size=2")
    assert code == 2
    assert "micro_batch_size" in err
    code, _, err = submit("--print", '--data.sources.0.path=["/scratch/code", "near.txt"]')
    assert code == 2
    assert not lacks(err, "data.sources.0.path", "near.txt")
    assert "tokenizer" not in err
    Path("near").mkdir()
    code, _, err = submit("--print", "--cluster.node_paths=['/scratchy']")
    assert not lacks(err, "data.sources.0.path", "data.tokenizer.path")
    # A folder that is here is checked here, wherever it lies
    code, _, err = submit(
        "--print", f"--data.sources.0.path={Path.cwd()}/near", f"--cluster.node_paths=['{Path.cwd()}']"
    )
    assert (code, "data.sources.0.path" in err) == (2, True)


def test_a_run_folder_is_not_only_on_nodes(submit: Run) -> None:
    Path("file").touch()
    here = Path.cwd()
    code, _, err = submit(f"--job.output={here}/file/runs", f"--cluster.node_paths=['/scratch', '{here}/file']")
    assert code == 2
    assert not lacks(err, "job.output", f"{here}/file")


def test_paths_of_nodes_are_whole(submit: Run) -> None:
    code, _, err = submit("--print", "--cluster.node_paths=['scratch']")
    assert code == 2
    assert not lacks(err, "cluster.node_paths", "'scratch'", "whole path")


def test_a_run_is_found_by_its_job_without_its_data(submit: Run) -> None:
    code, _, err = submit("--status")
    assert code == 2
    assert not lacks(err, "far", "no such run folder")
