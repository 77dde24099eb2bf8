"""Where documents come from survives to the shard: the file, line and id lead back to the text of any token."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from forge_core.contracts.errors import DataError
from forge_kit.data.origins import Origin
from forge_plugin_memmap.prepare import documents, inputs, origin_files, parquet_files, text_files
from forge_testing.refusals import lacks

Prepare = Callable[..., str]
NAMES = ("a.jsonl", "b.txt", "c.jsonl.gz", "d.parquet", "e.md")
COMMON = (*NAMES, "--held-out-every=3", "--shard-tokens=200", "--errors=skip")
FOREIGN = Path(__file__).parent / "foreign"


@pytest.fixture(autouse=True)
def input_files(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of every format, in small chunks and small row groups, with lines and rows that have no document."""
    monkeypatch.setattr(inputs, "CHUNK", 60)
    for module in (text_files, parquet_files):
        monkeypatch.setattr(module, "BLOCK", 32)
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 16)
    monkeypatch.setattr(origin_files, "DOCUMENTS", 4)
    texts = ["".join(chr(97 + (number + place) % 26) for place in range(3 + number % 20)) for number in range(40)]
    rows = [{"text": text, "id": f"a-{number}"} for number, text in enumerate(texts)]
    rows[7]["text"] = ""
    del rows[9]["id"]
    lines = [json.dumps(row) for row in rows]
    lines[23] = "not JSON"
    Path("a.jsonl").write_text("".join(line + "\n" for line in lines))
    Path("b.txt").write_text("one long text " * 9)
    Path("c.jsonl.gz").write_bytes(gzip.compress(Path("a.jsonl").read_bytes()))
    table = {"text": [text or None for text in (row["text"] for row in rows)], "id": pa.array(range(40))}
    parquet.write_table(pa.table(table), "d.parquet", row_group_size=7)
    Path("e.md").write_text("another")


def text_at(origin: Origin) -> str:
    """The text of a document, read again from where it is said to come from."""
    if origin.file.endswith(".parquet"):
        return parquet.read_table(origin.file).column("text")[origin.line - 1].as_py()
    data = Path(origin.file).read_bytes()
    text = (gzip.decompress(data) if origin.file.endswith(".gz") else data).decode()
    return text if origin.line is None else json.loads(text.splitlines()[origin.line - 1])["text"]


def letters(text: str) -> list[int]:
    return [ord(letter) - 96 if "a" <= letter <= "z" else 27 for letter in text]


def demand_origins(documents: Any) -> None:
    """Every document is what stands where it comes from."""
    ends = documents.ends()
    for number, (origin, end) in enumerate(zip(documents.origins(np.arange(len(ends))), ends, strict=True)):
        begin = ends[number - 1] if number else 0
        assert documents.tokens(begin, end - 1).tolist() == letters(text_at(origin))


@pytest.mark.parametrize("format", ["forge", "datatrove", "megatron"])
def test_each_document_leads_back_to_its_text(
    prepare: Prepare, open_documents: Callable[..., Any], format: str
) -> None:
    prepare(*COMMON, "--out=data", f"--format={format}")
    assert len(list(Path("data").glob("train-*.origins"))) > 2
    found = open_documents(path="data", end_of_text=0)
    demand_origins(found)
    demand_origins(found.held_out)
    # Any of them, in any shard, without those before
    for chosen in ([30], [0, 5, 41], []):
        assert [text_at(each) for each in found.origins(np.array(chosen, int))] == [
            text_at(found.origins(np.array([number]))[0]) for number in chosen
        ]
    ids = [origin.id for origin in found.origins(np.arange(len(found.ends()))) if origin.file == "a.jsonl"]
    assert "a-1" in ids
    assert None in ids
    # Numbers are kept as text
    rows = [each for each in found.origins(np.arange(len(found.ends()))) if each.file == "d.parquet"]
    assert all(origin.id == str(origin.line - 1) for origin in rows)


def test_held_out_by_the_dataset_and_unknown(prepare: Prepare, open_documents: Callable[..., Any], here: Path) -> None:
    prepare(*NAMES, "--out=data", "--errors=skip", "--shard-tokens=150")
    found = open_documents(path="data", held_out_every=4)
    demand_origins(found)
    demand_origins(found.held_out)
    # Ids alone come from anywhere
    os.rename("data/train-00000.bin", "ids.bin")
    os.rename("data/train-00000.ends", "ids.ends")
    known = open_documents(path="ids.bin", held_out_every=4)
    assert known.origins(np.array([0, 1])) == [None, None]


def test_what_is_kept_is_text_null_or_json(prepare: Prepare) -> None:
    rows = [
        {"text": "a", "url": "https://x", "id": 7, "meta": {"lang": "ä", "n": [1]}},
        {"text": "b", "url": None, "meta": ""},
        {"text": "c", "url": "\ud83d", "meta": False},
    ]
    Path("f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = prepare("f.jsonl", "--out=data", "--keep=url", "--keep=meta", "--keep=urk")
    # A key that no document has is told
    assert "kept: url of 2 documents, meta of 2 documents, urk of 0 documents" in out
    manifest = json.loads(Path("data/manifest.json").read_text())
    assert manifest["arguments"]["keep"] == ["url", "meta", "urk"]
    table = parquet.read_table("data/train-00000.origins")
    assert table.schema.metadata == {b"forge_origins": b"1"}
    assert table.to_pylist() == [
        {"file": "f.jsonl", "line": 1, "url": "https://x", "meta": '{"lang": "ä", "n": [1]}', "urk": None},
        {"file": "f.jsonl", "line": 2, "url": None, "meta": None, "urk": None},
        {"file": "f.jsonl", "line": 3, "url": "\\ud83d", "meta": "false", "urk": None},
    ]


def test_names_of_what_is_kept_and_folders_without_it(prepare: Prepare, forge_run: Callable[..., Any]) -> None:
    arguments = ("data", "prepare", "a.jsonl", "--out=data", "--tokenizer=./letters.py:Letters", "--errors=skip")
    code, _, err = forge_run(*arguments, "--keep=line")
    assert code == 2
    assert not lacks(err, "--keep", "'line'", "another name")
    prepare("a.jsonl", "--out=data", "--errors=skip")
    manifest = json.loads(Path("data/manifest.json").read_text())
    # As from before there were origins
    del manifest["arguments"]["keep"], manifest["kept"]
    Path("data/manifest.json").write_text(json.dumps(manifest))
    code, _, err = forge_run(*arguments)
    assert code == 2
    assert not lacks(err, 'keep: null then, ["id", "origin"] now')


def test_damage_is_named(prepare: Prepare, open_documents: Callable[..., Any], problems: Callable[..., Any]) -> None:
    prepare("a.jsonl", "--out=data", "--errors=skip")
    path = Path("data/train-00000.origins")
    whole = path.read_bytes()
    found = open_documents(path="data")
    path.write_bytes(whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :])
    with pytest.raises(Exception, match=r"SHA-256 of data/train-00000\.origins"):
        open_documents(path="data", verify="full")
    path.write_bytes(whole[:-9])
    with pytest.raises(DataError, match=r"train-00000\.origins"):
        found.origins(np.array([0]))
    assert not lacks(str(problems(path="data")[0]), "data/train-00000.origins", "damaged")
    parquet.write_table(pa.table({"text": ["a"]}), path)
    with pytest.raises(DataError, match=r"train-00000\.origins does not have the origins"):
        found.origins(np.array([0]))


def test_tables_of_dolma_have_the_id_source_and_line(open_documents: Callable[..., Any]) -> None:
    found = open_documents(path=str(FOREIGN / "dolma/part-0-00000.npy"), end_of_text=0)
    first, third = found.origins(np.array([0, 2]))
    assert first == Origin("a, b.jsonl", None, {"id": "document 0"})  # this writer was given places from 0
    assert third == Origin("a, b.jsonl", 2, {"id": "document 2"})
    assert str(third) == "a, b.jsonl:2 (id document 2)"
    assert len(found.origins(np.arange(len(found.ends())))) == len(found.ends())
