"""Runs the plugins of this folder as a stranger would: a job file names the file and the class."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from forge_core import Catalog, Job, load_job

HERE = Path(__file__).parent

BASE = """
[job]
output = "{output}"

[train]
steps = 4
global_batch_size = 4
seq_len = 8
device = "cpu"
gc_interval = 0

[model]
type = "forge_testing:TinyModel"

[optimizer]
type = "adamw"
lr = 1e-2

[[data.sources]]
type = "forge_testing:Numbers"
"""


@pytest.fixture
def job_files(tmp_path: Path) -> Callable[[str, str], list[str]]:
    """(name, TOML) -> the job files of a tiny language model, with that laid over it. `PROOFS` is this folder."""

    def write(name: str, text: str = "") -> list[str]:
        base, changes = tmp_path / "_tiny.toml", tmp_path / f"{name}.toml"
        base.write_text(BASE.format(output=tmp_path / "runs"))
        changes.write_text(f'job.name = "{name}"\n' + text.replace("PROOFS", str(HERE)))
        return [str(base), str(changes)]

    return write


@pytest.fixture
def job_of(job_files: Callable[[str, str], list[str]], catalog: Catalog) -> Callable[..., Job]:
    """The same, read; with overrides as on the command line, for so many ranks."""

    def read(name: str, text: str = "", *overrides: str, ranks: int = 1) -> Job:
        return load_job(*job_files(name, text), overrides=overrides, catalog=catalog, world_size=ranks)

    return read


@pytest.fixture
def run_folder(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: tmp_path / "runs" / name


@pytest.fixture
def records(run_folder: Callable[[str], Path]) -> Callable[[str, str], list]:
    """(name of a job, key) -> that number in every line of its metrics that has it."""

    def read(name: str, key: str) -> list:
        lines = map(json.loads, (run_folder(name) / "metrics.jsonl").read_text().splitlines())
        return [line[key] for line in lines if key in line]

    return read
