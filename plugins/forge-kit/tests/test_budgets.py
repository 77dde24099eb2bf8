"""Budgets of texts: `forge-run check --data` counts documents that are longer than a sequence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_core.cli import main

PARTS = """
from attrs import frozen
from forge_core.contracts.components import DatasetComponent
from forge_testing import ListedDocuments

@frozen(kw_only=True)
class Texts(DatasetComponent):
    def build(self, context):
        held_out = ListedDocuments([[1] * 40], 31)
        return ListedDocuments([[1] * 8, [1] * 9, [1] * 3], 31, held_out=held_out)

@frozen(kw_only=True)
class Endless(DatasetComponent):
    def build(self, context):
        return Lanes()

class Lanes:
    held_out, bytes_per_token, lanes = None, None, 1
    def read(self, lane, position):
        raise AssertionError("nothing is read")
"""
JOB = """
[train]
steps = 1
global_batch_size = 1
seq_len = 8
[model]
type = "forge_testing:TinyModel"
[[data.sources]]
type = "./parts.py:Texts"
name = "texts"
[[data.sources]]
type = "./parts.py:Endless"
name = "endless"
[optimizer]
type = "forge_testing:TinyAdamW"
"""


def test_documents_longer_than_a_sequence_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("parts.py").write_text(PARTS)
    Path("job.toml").write_text(JOB)
    assert main(["check", "job.toml", "--data"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "source texts: 4 documents\n"
        "  positions: 2 need more than train.seq_len = 8 (the most is 40)\n"
        "  2 do not fit: they are divided among sequences\n"
        "source endless: a stream, or sequences of its own: nothing is measured before training\n\nok: job.toml"
    )
    assert main(["check", "job.toml", "--data", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert (data["texts"]["documents"], data["texts"]["budgets"][0]["over"], data["endless"]) == (4, 2, None)
