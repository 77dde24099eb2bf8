"""`huggingface` keeps the contracts of its kind, read as a whole and as a stream."""

from __future__ import annotations

import json

from forge_plugin_huggingface import HuggingFace
from forge_plugin_text import Bytes
from forge_testing.suites import DatasetSuite


def write_rows(folder):
    for number in range(4):
        rows = [{"text": f"row {row} of file {number}, " * (1 + row % 3)} for row in range(12)]
        (folder / f"part-{number}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(folder)


class TestWhole(DatasetSuite):
    job = {"data": {"tokenizer": Bytes()}}

    def make(self, folder):
        return HuggingFace(path=write_rows(folder), held_out_every=4)


class TestStream(DatasetSuite):
    job = {"data": {"tokenizer": Bytes()}}

    def make(self, folder):
        return HuggingFace(path=write_rows(folder), streaming=True, held_out_every=4, lanes=2, shuffle=3)
