"""Documents begin as their tokenizer asks, once each, however long they are and whoever encodes them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from forge_kit.data.token_file import TokenFile
from forge_kit.data.tokenizers import begin_of_text
from forge_plugin_memmap.prepare import documents, encoding
from forge_plugin_memmap.tokenizer_folder import load_kept
from forge_testing.refusals import lacks

BEGIN = [26, 25]
"""Ids that no text below has: z and y."""
TEXTS = ["one", "two " * 40, "three\nfour\n" * 9, "five"]


@pytest.fixture(autouse=True)
def begins(here: Path) -> None:
    """The tokenizer `./letters.py:Letters` asks for a beginning, and knows something that only its users know of."""
    source = (here / "letters.py").read_text()
    more = f"vocab_size, end_of_text, begin_of_text = 28, 0, {BEGIN}\n\n    def stop_ids(self):\n        return [0, 7]"
    (here / "letters.py").write_text(source.replace("vocab_size, end_of_text = 28, 0", more))


def ids_in(folder: str) -> list[list[int]]:
    found = []
    for path in sorted(Path(folder).glob("train-*.bin")):
        file = TokenFile(path.with_suffix(""))
        found += [file.tokens(start, end).tolist() for start, end in pairwise([0, *file.ends().tolist()])]
    return found


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in pieces"])
def test_every_document_begins_once(prepare, monkeypatch, whole: bool, workers: str) -> None:
    if not whole:
        if workers == "2":
            pytest.skip("workers are other processes, whose pieces are as long as ever")
        for module in (documents, encoding):
            monkeypatch.setattr(module, "PIECE_CHARACTERS", 20)
    for number, text in enumerate(TEXTS):
        Path(f"{number}.txt").write_text(text)
    Path("lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare(*(f"{number}.txt" for number in range(len(TEXTS))), "lines.jsonl", "--out=out", f"--workers={workers}")
    tokenizer = load_kept(Path("out", "tokenizer"))
    assert ids_in("out") == [[*BEGIN, *tokenizer.encode(text), 0] for text in TEXTS * 2]


def test_the_tokenizer_of_the_folder_knows_what_its_own_knows(prepare) -> None:
    Path("a.txt").write_text("one")
    prepare("a.txt", "--out=out")
    kept = load_kept(Path("out", "tokenizer"))
    assert begin_of_text(kept) == BEGIN
    assert kept.stop_ids() == [0, 7]


def test_a_folder_from_before_a_tokenizer_had_a_key_is_finished_still(prepare, forge_run) -> None:
    """With the key's default; another value is another tokenizer."""
    Path("a.txt").write_text("one")
    arguments = ["a.txt", "--out=out"]
    prepare(*arguments)
    manifest = json.loads(Path("out", "manifest.json").read_text())
    del manifest["arguments"]["tokenizer"]["seconds"]
    Path("out", "manifest.json").write_text(json.dumps(manifest))
    prepare(*arguments)
    tokenizer = ["--workers=1", "--tokenizer=./letters.py:Letters", "--tokenizer.seconds=0.5"]
    code, _, err = forge_run("data", "prepare", *arguments, *tokenizer)
    assert code == 2
    assert not lacks(err, "out", "tokenizer", 0.5)
