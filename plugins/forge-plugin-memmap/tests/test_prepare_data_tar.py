"""Tar archives of texts, as webdataset writes them, become documents."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_plugin_memmap.prepare import tar_files
from forge_testing.refusals import lacks

Prepare = Callable[..., str]
FILES = {
    "web/a.txt": "first",
    "web/a.json": json.dumps({"id": "doc-a", "origin": {"url": "x"}}),
    "web/b.json": json.dumps({"text": "second", "id": 7}),
    "web/readme": "no document",
    "web/c.txt": "third",
    "d.jpg": "no text",
    "e.txt": "",
}


def write_tar(path: str, files: dict[str, str]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content.encode())
            archive.addfile(info, io.BytesIO(content.encode()))


@pytest.fixture(autouse=True)
def archive(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_files, "BLOCK", 1)
    write_tar("a.tar", FILES)


def test_a_group_is_a_document_with_its_name_as_its_id(prepare: Prepare, open_documents: Any) -> None:
    out = prepare("a.tar", "--out=data", "--errors=skip")
    assert not lacks(out, "no field: 1, at a.tar:4 (d has neither .txt nor .json)", "empty: 1, at a.tar:5")
    found = open_documents(path="data")
    ids = [id_ for text in ("first", "second", "third") for id_ in [*(ord(letter) - 96 for letter in text), 0]]
    assert found.tokens(0, 99).tolist() == ids
    origins = found.origins(np.arange(3))
    assert [str(origin) for origin in origins] == [
        'a.tar:1 (id doc-a, origin {"url": "x"})',
        "a.tar:2 (id 7)",
        "a.tar:3 (id web/c)",
    ]


def test_parts_have_the_bytes_of_one_command(prepare: Prepare) -> None:
    write_tar("b.tar", {f"{number}.txt": "text" * number for number in range(1, 9)})
    prepare("a.tar", "b.tar", "--out=whole", "--errors=skip", "--shard-tokens=20")
    for number in (2, 1):
        prepare("a.tar", "b.tar", "--out=data", "--errors=skip", "--shard-tokens=20", f"--part={number}/2")
    prepare("a.tar", "b.tar", "--out=data", "--errors=skip", "--shard-tokens=20", "--join")
    for path in Path("whole").glob("*.*"):
        assert Path("data", path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("size", [700, 1536, 100])
def test_an_archive_that_was_cut_short_is_named_before_anything_is_read(
    forge_run: Callable[..., Any], size: int
) -> None:
    os.truncate("a.tar", size)  # within a file, between two, and within a header
    code, _, err = forge_run("data", "prepare", "a.tar", "--out=data", "--tokenizer=./letters.py:Letters")
    assert code == 2
    assert not lacks(err, "'a.tar'", "make it again")
    assert not Path("data").exists()
    Path("job.toml").write_text(
        '[train]\nsteps = 1\nglobal_batch_size = 1\nseq_len = 4\n[model]\ntype = "forge_testing:TinyModel"\n'
        '[optimizer]\ntype = "forge_testing:TinyAdamW"\n[data.tokenizer]\ntype = "bytes"\n'
        '[[data.sources]]\ntype = "text"\npath = "a.tar"\n'
    )
    code, _, err = forge_run("check", "job.toml")
    assert code == 2
    assert not lacks(err, "data.sources.0.path", "'a.tar'" if "'a.tar'" in err else "a.tar", "make it again")
