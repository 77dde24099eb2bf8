from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge_core.cli import main
from forge_core.contracts.components import TrainingHook

PARTS = '''
from __future__ import annotations

import hashlib

from attrs import frozen

from forge_core.contracts.components import DatasetComponent, TokenizerComponent
from forge_kit.data.document_streams import StreamedDocument, packed
from forge_testing import ListedDocuments

END = 31


@frozen(kw_only=True)
class Letters(TokenizerComponent):
    """A to Z are 1 to 26, a blank is 27, a line break 28; 0, 29 and 30 are special; 31 ends a document."""

    def build(self, context, documents):
        return LetterTokenizer()

    load = build


class LetterTokenizer:
    vocab_size, end_of_text = 32, END

    def encode(self, text):
        return [{" ": 27, "\\n": 28, "<": 29, ">": 30}.get(c) or ord(c) - 64 for c in text]

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, ids):
        return "".join({27: " ", 28: "\\n"}.get(i) or chr(64 + i) for i in ids if 0 < i < 29)

    def save(self, folder):
        (folder / "tokenizer.json").write_text(
            '{"added_tokens": [{"id": 29, "content": "<|user|>", "special": true},'
            ' {"id": 30, "content": "<|answer|>", "special": true}]}'
        )

    def fingerprint(self):
        return hashlib.sha256(b"letters").hexdigest()


@frozen(kw_only=True)
class Chats(DatasetComponent):
    """Chats of which the answers are learned."""

    count: int = 8
    where: str = "memory"

    def build(self, context):
        texts = [f"<ASK {'A' * (1 + n % 3)}>SAY {'B' * (1 + n % 2)}" for n in range(self.count)]
        learned = [[position > text.index(">") for position in range(len(text))] for text in texts]
        ids = [context.tokenizer.encode(text) for text in texts]
        return ListedDocuments(ids, END, learned, ListedDocuments(ids[:2], END, learned[:2]))


@frozen(kw_only=True)
class Turns(DatasetComponent):
    """Chats of two turns, each ended by the end of text."""

    def build(self, context):
        turns = [context.tokenizer.encode(f"<{letter}>{letter}") for letter in "ABCD"]
        chats = [[*first, END, *second] for first, second in zip(turns[::2], turns[1::2], strict=True)] * 8
        return ListedDocuments(chats, END)


@frozen(kw_only=True)
class Talk(DatasetComponent):
    """A stream of documents in two lanes."""

    def build(self, context):
        return packed(Lanes(), context)


class Lanes:
    held_out, lanes = None, 2

    def read(self, lane, position):
        import numpy as np

        number = (position or {"number": 0})["number"]
        while True:
            ids = np.array([1 + lane + 2 * ((number + k) % 9) for k in range(3 + number % 4)] + [END])
            yield StreamedDocument(ids, None, {"number": number})
            number += 1


@frozen(kw_only=True)
class Unshifted(DatasetComponent):
    """Sequences whose labels are the inputs themselves: a common mistake."""

    def build(self, context):
        return Same(context.job.train.seq_len)


class Same:
    held_out = bytes_per_token = None

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return 16

    def __getitem__(self, index):
        import numpy as np

        return {"input_ids": np.arange(self.length) + index, "labels": np.arange(self.length) + index}


@frozen(kw_only=True)
class Pictures(DatasetComponent):
    """Sequences of an image of 2 x 3 patches, a word, an image of 1 x 2, and padding."""

    def build(self, context):
        return Drawn()


class Drawn:
    held_out = bytes_per_token = None

    def __len__(self):
        return 16

    def __getitem__(self, index):
        import numpy as np

        inputs = np.array([-1] * 6 + [1, 2] + [-1] * 2 + [3, END, END, END])
        labels = np.array([-100] * 5 + [1, 2, -100, -100, 3, 4, -100, -100, -100])
        grids = np.array([[1, 2, 3], [1, 1, 2], [0, 0, 0]])
        return {"input_ids": inputs, "labels": labels, "grids": grids, "patches": np.zeros((8, 4), np.uint8)}
'''

JOB = """
[job]
output = "runs"
[train]
steps = 6
global_batch_size = 4
seq_len = {seq_len}
[model]
type = "forge_testing:TinyModel"
[data.tokenizer]
type = "./parts.py:Letters"
[[data.sources]]
type = "./parts.py:{source}"
[optimizer]
type = "forge_testing:TinyAdamW"
"""


class Batches(TrainingHook):
    """Keeps the global batch of every step, in the order drawn."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[list[int], list[int]]]] = []

    def on_step_end(self, context: Any) -> None:
        rows = [row for b in context.batches for row in zip(b["input_ids"].tolist(), b["labels"].tolist(), strict=True)]
        self.steps.append(rows)


@pytest.fixture
def batches() -> Batches:
    """A hook that keeps what a run trains on."""
    return Batches()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, but for `parts.py`; no terminal, 80 columns, an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "parts.py").write_text(PARTS)
    return tmp_path


@pytest.fixture
def write_job(here: Path) -> Callable[..., str]:
    """Write a job over a source of `parts.py`, with further lines; returns its name."""

    def write(source: str, more: str = "", seq_len: int = 14) -> str:
        (here / "job.toml").write_text(JOB.format(source=source, seq_len=seq_len) + more)
        return "job.toml"

    return write


@pytest.fixture
def data(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `forge-run data …` in this process: exit code, standard output, standard error."""

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(["data", *argv])
        except SystemExit as end:
            code = int(end.code or 0)
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def as_json(data: Callable[..., tuple[int, str, str]]) -> Callable[..., Any]:
    """Run `forge-run data … --json` and read what it prints."""

    def run(*argv: str) -> Any:
        code, out, err = data(*argv, "--json")
        assert code == 0, err
        return json.loads(out)

    return run
