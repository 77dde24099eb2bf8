"""`compile` keeps the contracts of its kind."""

from __future__ import annotations

import torch._dynamo.backends.common  # noqa: F401  imported once, and not by each process

from forge_plugin_compile import Compile
from forge_testing import job_problems
from forge_testing.distribution import check_distribution
from forge_testing.suites import StageSuite


def test_the_distribution():
    check_distribution("forge-plugin-compile")


class TestCompile(StageSuite):
    component = Compile(backend="aot_eager")


def test_a_torch_that_loses_gradients_is_refused(make_job, monkeypatch):
    job = make_job(parallel={"compile": Compile(backend="eager")})
    assert not job_problems(job)
    monkeypatch.setattr("forge_plugin_compile.compile.version", lambda name: "2.11.0+cu130")
    (problem,) = job_problems(job)
    assert "parallel.compile: torch 2.11.0+cu130 loses gradients of compiled blocks" in problem
