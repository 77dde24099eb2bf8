"""`forge-run data dedup` with `substrings`: repeated passages are found and cut out, to the token."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cleaning_files import Command, lines_of, write_lines, write_table
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel

from forge_plugin_datatrove.memory import suffixes_need
from forge_plugin_datatrove.substrings import SEPARATOR_BYTES, repeated_ranges

MIN_TOKENS = 12
SPECIAL = "<|end of text|>"


def marks(documents: Sequence[Sequence[int]], length: int, keep_first: bool = False) -> list[list[bool]]:
    """Which tokens belong to a window that occurs more than once, by a table of all windows."""
    places = defaultdict(list)
    for number, tokens in enumerate(documents):
        for start in range(len(tokens) - length + 1):
            places[tuple(tokens[start : start + length])].append((number, start))
    marked = [[False] * len(tokens) for tokens in documents]
    for found in places.values():
        for number, start in found[keep_first:] if len(found) > 1 else []:
            marked[number][start : start + length] = [True] * length
    return marked


def in_sequence(documents: Sequence[Sequence[int]], task: int) -> tuple[Any, Any, Any]:
    """The sequence that datatrove makes of documents, a separator before each, and where documents begin and end."""
    separators = [[0xFFFF, n % task, 0, 0xFFFF, n // task, 0] for n in range(len(documents))]
    tokens = [*chain.from_iterable(chain(*pair) for pair in zip(separators, documents, strict=True))]
    sizes = np.array([SEPARATOR_BYTES + 2 * len(document) for document in documents])
    ends = np.cumsum(sizes)
    return np.array(tokens, "<u2").view(np.uint8), ends - sizes + SEPARATOR_BYTES, ends


def test_ranges_are_the_windows_that_a_table_of_all_finds() -> None:
    draw = random.Random(0)
    for trial in range(60):
        # Few tokens, so that passages overlap each other and themselves; and many, of which some are planted
        vocabulary = draw.choice([1, 2, 3, 5, 65_536])
        length = draw.randint(1, 6)
        documents = [draw.choices(range(vocabulary), k=draw.randrange(40)) for _ in range(draw.randint(1, 6))]
        documents[-1] = documents[-1] + documents[0][3:20]
        sequence, begins, ends = in_sequence(documents, task=draw.randint(1, 4))
        for keep_first in (False, True):
            ranges = repeated_ranges(sequence, begins, ends, length, keep_first)
            covered = np.zeros(len(sequence), bool)
            for begin, end in ranges:
                covered[begin:end] = True
            found = [covered[begin:end:2].tolist() for begin, end in zip(begins, ends, strict=True)]
            assert found == marks(documents, length, keep_first), trial
            # And no byte of a separator
            assert covered.sum() == 2 * sum(map(sum, found))


def save_tokenizer(path: Path, texts: Sequence[str], size: int) -> Tokenizer:
    """Saves a byte-level tokenizer; of 256 tokens, each is a byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(SPECIAL)])
    tokenizer.save(str(path))
    return tokenizer


def documents_with_planted_passages() -> dict[str, str]:
    """Thirty texts of words that differ, some with a passage of others in them, between characters of equal bytes."""
    draw = random.Random(3)
    letters = "abcdefghijklmnoprstuvwäéèñ漢\U0001f600"

    def text(words: int) -> str:
        return " ".join("".join(draw.choices(letters, k=6)) for _ in range(words))

    texts = [text(30) for _ in range(30)]
    passages = [f" {text(7)} {SPECIAL} é" for _ in range(3)]
    # The bytes of é and è differ in the last one, those of é and ä too: ranges begin and end within them
    for number, (place, before, after) in enumerate([(0, "é", "ä"), (11, "è", "é"), (12, "é", "é"), (25, "ñ", "漢")]):
        middle = draw.randrange(len(texts[place]))
        passage = passages[number % 2]
        texts[place] = texts[place][:middle] + before + passage + after + texts[place][middle:]
    # One is nothing else, at the end of the last task
    texts += ["short, and not repeated", passages[1]]
    texts[20] = passages[1] + texts[20]
    texts[21] += passages[2] * 2
    return {f"document {number}": each for number, each in enumerate(texts)}


def cut(text: str, tokenizer: Tokenizer, marked: Sequence[bool]) -> tuple[str, list[list[int]]]:
    """A text without the characters all of whose tokens are marked, and where these were."""
    covering = defaultdict(list)
    for (start, end), is_marked in zip(tokenizer.encode(text).offsets, marked, strict=True):
        for place in range(start, end):
            covering[place].append(is_marked)
    gone = [place for place in range(len(text)) if all(covering[place])]
    ranges: list[list[int]] = []
    for place in gone:
        if ranges and ranges[-1][1] == place:
            ranges[-1][1] += 1
        else:
            ranges.append([place, place + 1])
    return "".join(each for place, each in enumerate(text) if place not in {*gone}), ranges


TABLE = f"""
[dedup]
type = "substrings"
tokenizer_name_or_path = "tokenizer.json"
min_tokens = {MIN_TOKENS}
min_doc_words = 5
"""


@pytest.mark.parametrize(("size", "keep_first"), [(256, False), (400, True)], ids=["bytes", "merges, first kept"])
def test_planted_passages_are_cut_out_and_nothing_else(
    folder: Path, data: Command, size: int, keep_first: bool
) -> None:
    texts = documents_with_planted_passages()
    tokenizer = save_tokenizer(folder / "tokenizer.json", [*texts.values()], size)
    write_lines(folder / "in/a.jsonl", [{"id": id_, "text": text} for id_, text in texts.items()])
    marked = marks([tokenizer.encode(text).ids for text in texts.values()], MIN_TOKENS, keep_first)
    wanted = {id_: cut(text, tokenizer, each) for (id_, text), each in zip(texts.items(), marked, strict=True)}
    changed = {id_: ranges for id_, (_, ranges) in wanted.items() if ranges}
    assert 5 <= len(changed) <= 7
    outputs = []
    for tasks in (1, 3):
        write_table(folder, f"tasks = {tasks}\n{TABLE}keep_first = {str(keep_first).lower()}\n")
        (folder / "clean.toml").write_text((folder / "clean.toml").read_text().replace('"out"', f'"out{tasks}"'))
        summary = data("dedup")
        stage = folder / f"out{tasks}/dedup"
        outputs.append([lines_of(stage / name) for name in ("documents", "removed", "changed")])
        [step] = summary["steps"]
        assert (step["removed"], step["changed"]) == (1, len(changed) - 1)
    # Whatever the division into tasks
    assert outputs[0] == outputs[1]
    documents, removed, records = outputs[0]
    [last] = [*texts][-1:]
    assert {each["id"]: each["text"] for each in documents} == {
        id_: text for id_, (text, _) in wanted.items() if id_ != last
    }
    assert {each["id"]: each["removed_ranges"] for each in (*records, *removed)} == changed
    assert [each["id"] for each in removed] == [last]
    fate = data("filter", "--why", "document 12")
    assert fate["kept"]["origin"] == fate["changed"][0]["origin"]
    assert fate["changed"][0]["removed_ranges"] == changed["document 12"]


def test_a_tokenizer_that_datatrove_cannot_use_is_refused(folder: Path, data: Command) -> None:
    write_lines(folder / "in/a.jsonl", [{"text": "a text"}])
    write_table(folder, '[dedup]\ntype = "substrings"\n')
    assert "clean.toml:4: dedup.tokenizer_name_or_path: required key is missing" in data("dedup", code=2)
    write_table(folder, TABLE)
    message = data("dedup", code=2)
    assert "clean.toml:7: dedup.tokenizer_name_or_path: would fetch 'tokenizer.json', which is no file here" in message
    # By words, so that spaces are lost
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    assert "tokenizer.json does not give back the bytes of a text; a byte-level tokenizer" in data("dedup", code=2)
    tokenizer = Tokenizer(models.WordLevel({str(n): n for n in range(70_000)}, unk_token="0"))
    tokenizer.save(str(folder / "tokenizer.json"))
    assert "has 70,000 tokens, and datatrove's sequences have room for 65,536" in data("dedup", code=2)


class TestMemory:
    def test_it_is_refused_with_the_figure_before_it_is_taken(self, folder: Path, data: Command) -> None:
        save_tokenizer(folder / "tokenizer.json", [], 256)
        write_lines(folder / "in/a.jsonl", [{"text": "a text"}])
        write_table(folder, f"tasks = 2\nmemory_gb = 1e-3\n{TABLE}")
        message = data("dedup", code=2)
        assert "dedup, 2-ranges: needs about 0.03 GB (a suffix array of 2.4e-05 MB of tokens: 9 bytes" in message
        assert "0.001 GB are available; divide the inputs" in message
        assert not (folder / "out/dedup/work/sequences/dataset.big_sequence").exists()

    def test_more_than_datatrove_can_number_is_refused(self) -> None:
        with pytest.raises(Exception, match=r"5 GB of tokens, and datatrove's offsets of 32 bits end at 4.29 GB"):
            suffixes_need(5 * 10**9)

    MEASURE = """
import sys
from pathlib import Path
from forge_plugin_datatrove.substrings import RepeatedRanges, Repeats
peak = lambda: 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
before = peak()
RepeatedRanges(".", Repeats()).run()
print(peak() - before)
"""

    def test_the_estimate_is_above_what_it_takes_where_all_repeats_and_not_far(self, folder: Path) -> None:
        size = 6_000_000
        tokens = np.random.default_rng(0).integers(0, 30_000, size // 6, dtype=np.uint16)
        np.resize(tokens, size // 2).tofile(folder / "dataset.big_sequence")
        np.array([size], "<u8").tofile(folder / "00000.es_sequence.size")
        command = [sys.executable, "-c", self.MEASURE]
        measured = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        need = suffixes_need(size).bytes
        assert 0.5 * need < measured < need
