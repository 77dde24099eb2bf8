"""Shards for other libraries: the bytes are those that their own writers have written of the same documents."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_plugin_memmap.prepare import run, shard_formats, writing
from forge_testing.refusals import lacks

Prepare = Callable[..., str]
TOKENIZER = "--tokenizer=./letters.py:Letters"
TEXTS = ["ab", "c", "zz"]
IDS = [[1, 2, 0], [3, 0], [26, 26, 0]]

DATATROVE = {
    ".ds": "01000200000003000000 1a001a000000",
    ".ds.index": "0300000000000000 0500000000000000 0800000000000000",
}
"""By `TokenizedFile` of datatrove 0.10.1 with token_size=2: write(ids, None) of each document of IDS, close()."""
MEGATRON = {
    ".bin": "010002000000 03000000 1a001a000000",
    ".idx": "4d4d4944494458 0000 0100000000000000 08 0300000000000000 0400000000000000 03000000 02000000 03000000"
    "0000000000000000 0600000000000000 0a00000000000000"
    "0000000000000000 0100000000000000 0200000000000000 0300000000000000",
}
"""By `IndexedDatasetBuilder` of Megatron-LM (d98e8a64dd) with uint16: add_document(ids, [len(ids)]), finalize()."""
RECORDED = {"datatrove": DATATROVE, "megatron": MEGATRON}


@pytest.fixture(autouse=True)
def texts(here: Path) -> None:
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))


def content(folder: str) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize("format", RECORDED)
def test_the_bytes_are_those_of_the_librarys_own_writer(prepare: Prepare, format: str) -> None:
    out = prepare("a.jsonl", "--out=data", f"--format={format}")
    names = {path.name for path in Path("data").glob("train*")}
    for suffix, recorded in RECORDED[format].items():
        assert Path(f"data/train-00000{suffix}").read_bytes() == bytes.fromhex(recorded)
        names.remove(f"train-00000{suffix}")
    if format == "datatrove":
        assert Path("data/train-00000.ds.metadata").read_text().splitlines()[:2] == ["Unknown Tokenizer|2", "8"]
        assert not lacks(out, "DatatroveFolderDataset", "token_size=2")
        names.remove("train-00000.ds.metadata")
    else:
        assert "--data-path data/train-00000\n" in out
    assert names == {"train-00000.origins"}


@pytest.mark.parametrize("format", RECORDED)
def test_four_bytes_shards_held_out_documents_and_parts(
    prepare: Prepare, here: Path, open_documents: Callable[..., Any], format: str
) -> None:
    """The ids are those of Forge's own format, whatever it is that is written."""
    source = (here / "letters.py").read_text()
    (here / "letters.py").write_text(source.replace("end_of_text = 28, 0", "end_of_text = 70000, 0"))
    Path("a.jsonl").write_text("".join(json.dumps({"text": text * 3}) + "\n" for text in TEXTS * 9))
    common = ("a.jsonl", "--held-out-every=4", "--shard-tokens=30")
    prepare(*common, "--out=own")
    prepare(*common, "--out=data", f"--format={format}")
    for path in sorted(Path("own").glob("*.bin")):
        ids, stem = path.read_bytes()[64:], str(Path("data", path.stem))
        ends = np.fromfile(path.with_suffix(".ends"), "<i8")
        assert Path(stem + (".ds" if format == "datatrove" else ".bin")).read_bytes() == ids
        if format == "datatrove":
            assert np.fromfile(stem + ".ds.index", "<u8").tolist() == ends.tolist()
        else:
            data = Path(stem + ".idx").read_bytes()
            assert struct.unpack_from("<9sQBQQ", data) == (b"MMIDIDX\0\0", 1, 4, len(ends), len(ends) + 1)
            lengths = np.frombuffer(data, "<i4", len(ends), 34)
            assert np.cumsum(lengths).tolist() == ends.tolist()
            starts = np.frombuffer(data, "<i8", len(ends), 34 + 4 * len(ends))
            assert starts.tolist() == [0, *(4 * ends[:-1])]
    # Forge itself reads them too, with what is held out
    own, read = open_documents(path="own"), open_documents(path="data", end_of_text=0)
    for same, other in ((own, read), (own.held_out, read.held_out)):
        assert other.tokens(0, len(same) + 1).tolist() == same.tokens(0, len(same)).tolist()
        assert other.ends().tolist() == same.ends().tolist()
    for number in (2, 1):
        prepare(*common, "--out=joined", f"--format={format}", f"--part={number}/2")
    prepare(*common, "--out=joined", f"--format={format}", "--join")
    assert content("joined") == content("data")


class Killed(BaseException):
    """Nothing but the process itself ends: no handler may tidy up."""


@pytest.mark.parametrize("format", RECORDED)
@pytest.mark.parametrize("place", ["before the index", "within it", "after it"])
def test_a_command_that_is_killed_at_the_end_of_a_shard_continues(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch, format: str, place: str
) -> None:
    monkeypatch.setattr(run, "SAVE_EVERY_S", 0)
    monkeypatch.setattr("forge_plugin_memmap.prepare.inputs.CHUNK", 1)
    monkeypatch.setattr("forge_plugin_memmap.prepare.text_files.BLOCK", 8)
    prepare("a.jsonl", "--out=whole", f"--format={format}")

    def end(path: Path, content: bytes = b"") -> Any:
        if place == "within it":
            path.write_bytes(content[:-9])
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(*((writing, "file_digest") if place == "after it" else (shard_formats, "_write")), end)
        with pytest.raises(Killed):
            prepare("a.jsonl", "--out=data", f"--format={format}")
    assert "continuing after 8 tokens" in prepare("a.jsonl", "--out=data", f"--format={format}")
    assert content("data") == content("whole")


def test_a_folder_of_another_format_is_not_continued(prepare: Prepare, forge_run: Callable[..., Any]) -> None:
    prepare("a.jsonl", "--out=data")
    manifest = json.loads(Path("data/manifest.json").read_text())
    # As from before there were formats
    assert manifest["arguments"].pop("format") == "forge"
    Path("data/manifest.json").write_text(json.dumps(manifest))
    prepare("a.jsonl", "--out=data")
    code, _, err = forge_run("data", "prepare", "a.jsonl", "--out=data", TOKENIZER, "--format=megatron")
    assert code == 2
    assert not lacks(err, 'format: "forge" then, "megatron" now')
