"""The versions of torch that Forge was tested with: who states them, and what a run on another one says."""

from __future__ import annotations

import re
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

from forge_testing import TinyModel

ROOT = Path(__file__).parents[2]


def requirements():
    for path in (ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))):
        for line in tomllib.loads(path.read_text())["project"]["dependencies"]:
            if re.match(r"torch\b(?!-)", line):
                yield path.parent.name, line


def test_all_distributions_bound_torch_alike():
    lines = dict(requirements())
    assert len(lines) > 20
    assert set(lines.values()) == {"torch>=2.11,<2.16"}


@pytest.mark.parametrize(
    ("version", "tested"), [("2.10.1", False), ("2.11.0+cu130", True), ("2.15.1", True), ("2.16.0.dev20261120", False)]
)
def test_a_run_on_a_torch_that_was_not_tested_says_so_once(make_job, train, monkeypatch, version, tested):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    monkeypatch.setattr("forge_core.engine.reporting.metadata.requires", lambda name: [dict(requirements())[ROOT.name]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(make_job(steps=1, model=TinyModel(dim=8)))
    messages = [str(one.message) for one in caught if "was tested with" in str(one.message)]
    assert [version in message for message in messages] == ([] if tested else [True])
