"""`ForgeTokens`: datatrove's executors start the parts of `forge-run data prepare`."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

import pytest
from cleaning_files import write_lines
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader

from forge_core.cli import main
from forge_core.contracts.errors import JobError
from forge_plugin_datatrove import ForgeJoin, ForgeTokens

ARGUMENTS = ["in", "--tokenizer", "bytes", "--held-out-every", "5", "--shard-tokens", "300"]


@pytest.fixture
def inputs(folder: Path) -> Path:
    write_lines(folder / "in/a.jsonl", [{"text": f"document number {n}"} for n in range(50)])
    return folder


def executor(*steps: Any, logs: str = "logs", **options: Any) -> LocalPipelineExecutor:
    # Absolute, since fsspec keeps folders by their names over the tests of a process
    return LocalPipelineExecutor([*steps], workers=1, logging_dir=str(Path(logs).absolute()), **options)


def run(arguments: list[str], tasks: int) -> None:
    parts = executor(ForgeTokens(arguments), tasks=tasks, logs="logs/parts")
    executor(ForgeJoin(arguments), tasks=1, logs="logs/join", depends=parts).run()


def test_the_folder_has_the_bytes_of_one_command(inputs: Path) -> None:
    assert main(["data", "prepare", *ARGUMENTS, "--out", "one"]) == 0
    run([*ARGUMENTS, "--out", "three"], tasks=3)
    names = sorted(str(path.relative_to("one")) for path in Path("one").rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to("three")) for path in Path("three").rglob("*") if path.is_file())
    assert len(names) > 5
    _, different, missing = filecmp.cmpfiles("one", "three", names, shallow=False)
    assert (different, missing) == ([], [])


def test_a_rank_is_a_part(inputs: Path) -> None:
    arguments = [*ARGUMENTS, "--out", "tokens"]
    executor(ForgeTokens(arguments), tasks=3, local_tasks=1, local_rank_offset=1).run()
    assert [path.name for path in Path("tokens/parts").iterdir()] == ["2-of-3"]
    with pytest.raises(JobError, match="part 1/3 is missing"):
        executor(ForgeJoin(arguments), logs="logs/join").run()


def test_mistakes_are_found_when_the_pipeline_is_made(inputs: Path) -> None:
    with pytest.raises(JobError, match="nowhere"):
        ForgeTokens(["nowhere", "--tokenizer", "bytes", "--out", "tokens"])
    with pytest.raises(JobError, match="leave out --part, --parts and --join"):
        ForgeTokens([*ARGUMENTS, "--out", "tokens", "--part=1/3"])
    tokens = ForgeTokens([*ARGUMENTS, "--out", "tokens"])
    with pytest.raises(JobError, match="it is the first step"):
        executor(JsonlReader(str(inputs / "in")), tokens).run()
    join = ForgeJoin([*ARGUMENTS, "--out", "tokens"])
    with pytest.raises(JobError, match="the executor has tasks = 2"):
        executor(join, tasks=2, logs="logs/join").run()
