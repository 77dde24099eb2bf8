"""A job is checked once: what `load_job` returns says so, and no rank builds the model for checking a second time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import attrs
import pytest

from forge_core import Catalog, JobError, Trainer, load_job
from forge_core.config import rules
from forge_testing import TINY_JOB

pytestmark = pytest.mark.slow

PARTS = """
import os
from collections.abc import Iterable

from attrs import frozen

from forge_core import ParallelComponent
from forge_testing import TinyModel


@frozen(kw_only=True)
class Counted(TinyModel):
    def build(self, context):
        with open(f"built-by-{os.getpid()}", "a") as file:
            file.write("run\\n" if context.folder else "check\\n")  # only a run has a folder
        return super().build(context)


@frozen(kw_only=True)
class Curious(ParallelComponent):
    \"\"\"A stage that looks at the model when a job is checked, and leaves it alone.\"\"\"

    def model_problems(self, model, layout):
        return ()

    def build(self, context):
        from forge_core.contracts.runtime import ParallelStage

        return ParallelStage()
"""
JOB = TINY_JOB.replace("forge_testing:TinyModel", "./parts.py:Counted")
JOB += '[parallel.curious]\ntype = "./parts.py:Curious"\n'


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The job of these parts in the working directory; returns what each process has built the model for."""
    monkeypatch.chdir(tmp_path)
    Path("parts.py").write_text(PARTS)
    Path("job.toml").write_text(JOB)
    return lambda: {path.name: Counter(path.read_text().split()) for path in tmp_path.glob("built-by-*")}


def test_one_process_builds_the_model_once_for_checking_and_once_to_train(builds) -> None:
    Trainer(load_job("job.toml"), echo=lambda text: None).run()
    assert builds() == {f"built-by-{os.getpid()}": {"check": 1, "run": 1}}


def test_each_of_two_ranks_builds_the_model_once_for_checking_and_once_to_train(builds) -> None:
    command = [sys.executable, "-m", "forge_core", "job.toml", "--nproc", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    counts = sorted(builds().values(), key=lambda counter: counter.total())
    assert counts == [{"check": 1}, {"check": 1, "run": 1}, {"check": 1, "run": 1}]  # the launcher, then its ranks


def test_a_loaded_job_carries_its_layout(builds) -> None:
    job = load_job("job.toml", world_size=2)
    assert job.checked is not None
    assert job.layout_for(2) == job.checked.layout
    assert job.checked.layout.replicate == 2
    assert job.layout_for(1) is None


def test_a_job_that_was_changed_in_python_is_checked_again(builds) -> None:
    job = load_job("job.toml")
    train = attrs.evolve(job.train, micro_batch_size=3)
    with pytest.raises(JobError, match="micro_batch_size"):
        Trainer(attrs.evolve(job, train=train)).run()


@pytest.mark.parametrize("change", ["world size", "catalog", "data not looked at"])
def test_a_job_that_was_checked_for_something_else_is_checked_again(builds, change, monkeypatch) -> None:
    size, with_data = (2 if change == "world size" else 1), change != "data not looked at"
    job = load_job("job.toml", world_size=size, with_data=with_data)
    checks: list[int] = []

    def refuse(job, catalog, world_size):
        checks.append(world_size)
        raise JobError("checked again")

    monkeypatch.setattr("forge_core.engine.trainer.check_rules", refuse)
    with pytest.raises(JobError, match="checked again"):
        Trainer(job, catalog=Catalog.installed() if change == "catalog" else None).run()
    assert checks == [1]


def test_a_job_with_a_mistake_is_not_marked(builds) -> None:
    job = load_job("job.toml")
    changed = attrs.evolve(job, train=attrs.evolve(job.train, micro_batch_size=3))
    assert rules.check_rules(changed, Catalog.installed())
    assert changed.checked is None
