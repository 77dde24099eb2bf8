"""`text` and `python_stdlib` keep the contracts of their kind."""

from __future__ import annotations

import pytest

from forge_plugin_text import Bytes, PythonStdlib, Text
from forge_testing.suites import DatasetSuite


class TestText(DatasetSuite):
    job = {"data": {"tokenizer": Bytes()}}

    def make(self, folder):
        for number in range(6):
            (folder / f"{number}.txt").write_text(f"the text of document {number}, " * (number + 1))
        return Text(path=f"{folder}/*.txt", held_out_every=3)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A cache that tests share: it takes a while to tokenise the standard library."""
    return tmp_path_factory.mktemp("cache")


class TestPythonStdlib(DatasetSuite):
    @pytest.fixture(autouse=True)
    def cache(self, kept, monkeypatch):
        monkeypatch.setenv("FORGE_CACHE", str(kept))

    job = {"data": {"tokenizer": Bytes()}}
    component = PythonStdlib(held_out_every=2)
