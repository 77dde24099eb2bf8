"""Forge never reads its own runs as data, whatever dataset lists the files, and opens no pipe."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from forge_core.cli import main
from forge_testing.images import VISION_LANGUAGE_MODEL

JOB = """
[train]
steps = 2
global_batch_size = 2
seq_len = 64
[data.tokenizer]
type = "bytes"
[optimizer]
type = "adamw"
"""
LANGUAGE = """
[model]
type = "transformer"
dim = 16
layers = 1
attention = { heads = 2 }
"""


def text(folder: Path) -> None:
    (folder / "a.txt").write_text("some text to learn from")


def lines(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"text": "some text to learn from"}\n')


def ids(folder: Path) -> None:
    np.tile(np.uint16([1, 2, 3, 256]), 8).tofile(folder / "a.bin")


def pictures(folder: Path) -> None:
    Image.new("RGB", (16, 16)).save(folder / "a.png")
    (folder / "a.txt").write_text("black")


def shards(folder: Path) -> None:
    pictures(folder)
    with tarfile.open(folder / "a.tar", "w") as archive:
        for name in ("a.png", "a.txt"):
            archive.add(folder / name, name)
            (folder / name).unlink()


def records(folder: Path) -> None:
    pictures(folder)
    (folder / "a.jsonl").write_text('{"image": "a.png", "text": "black"}\n')


SOURCES = {
    "text": (text, 'type = "text"', LANGUAGE),
    "text of lines": (lines, 'type = "text"', LANGUAGE),
    "huggingface": (lines, 'type = "huggingface"', LANGUAGE),
    "memmap": (ids, 'type = "memmap"\nformat = { type = "raw", dtype = "uint16" }\nend_of_text = 256', LANGUAGE),
    "images": (pictures, 'type = "image_text"', VISION_LANGUAGE_MODEL),
    "shards of images": (shards, 'type = "image_text"', VISION_LANGUAGE_MODEL),
    "records of images": (records, 'type = "image_text"', VISION_LANGUAGE_MODEL),
}
"""Of each: what writes one document's files, the source's table, and the job's model."""
TEMPTING = ("metrics.jsonl", "plan.txt", "curves.png", "store.bin", "store.npy", "logs.tar", "job.toml")


def add_run(folder: Path) -> None:
    """What a run leaves, and a pipe of each format."""
    run = folder / "runs/first"
    run.mkdir(parents=True)
    for name in TEMPTING:
        (run / name).write_text("{}\n")
        if name != "job.toml":
            os.mkfifo(folder / f"pipe-{name}")
    (run / "provenance.json").write_text("{}")


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `forge-run check job.toml --data --json`: name of a source, keys of it -> facts of its data."""
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = tmp_path / "data"
    data.mkdir()
    monkeypatch.chdir(data)

    def run(name: str) -> Any:
        _, table, model = SOURCES[name]
        tables = JOB + model + f'[[data.sources]]\n{table}\npath = "."\n'
        (tmp_path / "job.toml").write_text(tables)
        code = main(["check", str(tmp_path / "job.toml"), "--data", "--json"])
        facts = json.loads(capsys.readouterr().out)
        assert facts["problems"] == []
        assert code == 0
        [source] = facts["data"].values()
        return source

    return run


@pytest.mark.parametrize("name", SOURCES)
def test_a_run_and_pipes_among_the_data_change_nothing(check: Any, name: str) -> None:
    SOURCES[name][0](Path())
    before = check(name)
    add_run(Path())
    after = check(name)
    left_out = after.pop("left_out")
    before.pop("left_out")
    assert after == before
    assert left_out["run folders"] == 1
    if name != "huggingface":  # its library leaves pipes out itself
        assert left_out["pipes, sockets or devices"] == len(TEMPTING) - 1
