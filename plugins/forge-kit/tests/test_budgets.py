"""Budgets of texts: `forge-run check --data` counts documents that are longer than a sequence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_core.cli import main
from forge_kit.data.block_sums import write_sums
from forge_kit.data.token_file import TokenFileWriter
from forge_testing.refusals import lacks

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
    heading, positions, misfits, endless, *_ = out.splitlines()
    assert not lacks(heading, "source texts", 4)
    assert not lacks(positions, "positions: 2", "train.seq_len = 8", 40)
    assert not lacks(misfits, 2, "divided")
    assert not lacks(endless, "source endless")
    assert "\nok: job.toml" in out
    assert main(["check", "job.toml", "--data", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert (data["texts"]["documents"], data["texts"]["budgets"][0]["over"], data["endless"]) == (4, 2, None)


def test_all_tokens_are_compared_with_their_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stored = "class Stored(DatasetComponent):\n    def build(self, context):\n        return TokenFile(Path('texts'))\n"
    imports = "from pathlib import Path\nfrom forge_kit.data.token_file import TokenFile\n"
    Path("parts.py").write_text(f"{PARTS}\n{imports}@frozen(kw_only=True)\n{stored}")
    Path("job.toml").write_text(
        JOB.partition('[[data.sources]]\ntype = "./parts.py:Endless"')[0].replace("Texts", "Stored")
    )
    with Path("job.toml").open("a") as file:
        file.write('[optimizer]\ntype = "forge_testing:TinyAdamW"\n')
    with TokenFileWriter(Path("texts"), 32, 31) as writer:
        writer.add("document", [1, 2, 3, 4])
    write_sums(Path("texts.bin"))
    assert main(["check", "job.toml", "--data"]) == 0
    data = bytearray(Path("texts.bin").read_bytes())
    data[-1] ^= 1
    Path("texts.bin").write_bytes(data)
    assert main(["check", "job.toml", "--data"]) == 1
    assert not lacks(capsys.readouterr().err, "texts.bin", "bytes 0 to 74", "CRC-32")
