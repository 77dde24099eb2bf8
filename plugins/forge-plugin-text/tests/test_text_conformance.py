"""`text` and `python_stdlib` keep the contracts of their kind."""

from __future__ import annotations

from forge_core.testing.suites import DatasetSuite
from forge_plugin_text import Bytes, PythonStdlib, Text


class TestText(DatasetSuite):
    job = {"data": {"tokenizer": Bytes()}}

    def make(self, folder):
        for number in range(6):
            (folder / f"{number}.txt").write_text(f"the text of document {number}, " * (number + 1))
        return Text(path=f"{folder}/*.txt", held_out_every=3)


class TestPythonStdlib(DatasetSuite):
    job = {"data": {"tokenizer": Bytes()}}
    component = PythonStdlib(held_out_every=2)
