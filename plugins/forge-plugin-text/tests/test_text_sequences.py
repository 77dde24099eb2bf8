"""From documents to sequences: no token is lost, doubled or shifted."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge_core.contracts.errors import ForgeError
from forge_core.data.packing import Concatenate
from forge_core.data.windows import TrainingWindows
from forge_kit.data.cache import CachedFolder
from forge_kit.data.token_file import HEADER, TokenFile
from forge_plugin_text import Text, tokens
from forge_plugin_text.bytes import ByteTokenizer
from forge_plugin_text.corpus import CorpusFacts
from forge_plugin_text.reading import Document
from forge_plugin_text.split import Split
from forge_testing.refusals import naming

END = ByteTokenizer.end_of_text


class FakeCorpus:
    """Documents from memory."""

    def __init__(self, texts: list[str], split: Split) -> None:
        self._texts, self.split = texts, split

    def __str__(self) -> str:
        return f"{len(self._texts)} texts"

    def describe(self) -> CorpusFacts:
        count = len(self._texts)
        held_out = self.split.holds_out_any
        return CorpusFacts(name=str(self), fingerprint="", holds_out_any=held_out, files=count, size=0, empty=0)

    def documents(self):
        for number, text in enumerate(self._texts):
            document = Document(f"{number}.txt", f"{number}.txt", text)
            yield document, self.split.holds_out(number, document)


def stream(texts: list[str]) -> list[int]:
    """What the ids of these documents should be, one after the other."""
    return [id_ for text in texts if text for id_ in (*text.encode(), END)]


def sequences(folder: Path, texts: list[str], seq_len: int, every: int = 0) -> TrainingWindows:
    corpus = FakeCorpus(texts, Split(every))
    info = tokens.write_tokens(folder, corpus, ByteTokenizer())
    documents = tokens.open_documents(CachedFolder(folder, info), corpus.describe(), lambda: corpus)
    return TrainingWindows(documents, seq_len, Concatenate())


texts = st.lists(st.text(max_size=30), min_size=2, max_size=12)
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@given(texts=texts, seq_len=st.integers(1, 16))
@same_folder
def test_every_training_token_is_an_input_once_and_its_label_is_the_next(
    tmp_path: Path, texts: list[str], seq_len: int
) -> None:
    expected = stream(texts)
    data = sequences(tmp_path, texts, seq_len)
    if len(expected) <= seq_len:
        assert len(data) == 0
        return
    inputs = np.concatenate([data[i]["input_ids"] for i in range(len(data))]).tolist()
    labels = np.concatenate([data[i]["labels"] for i in range(len(data))]).tolist()
    assert len(inputs) == len(data) * seq_len
    assert inputs == expected[: len(inputs)]
    assert labels == expected[1 : len(inputs) + 1]
    assert 1 <= len(expected) - len(inputs) <= seq_len


@given(texts=texts, seq_len=st.integers(1, 16), every=st.integers(2, 4))
@same_folder
def test_every_held_out_token_is_a_label_once_after_the_token_before_it(
    tmp_path: Path, texts: list[str], seq_len: int, every: int
) -> None:
    texts = ["held out", "enough for one training sequence", *texts]
    held = sequences(tmp_path, texts, seq_len, every).held_out
    assert held is not None
    expected = stream(texts[::every])
    inputs = np.concatenate([held[i]["input_ids"] for i in range(len(held))])
    labels = np.concatenate([held[i]["labels"] for i in range(len(held))])
    assert labels.tolist() == expected + [-100] * (len(labels) - len(expected))
    assert inputs[: len(expected)].tolist() == [END, *expected[:-1]]
    assert set(inputs[len(expected) :]) <= {END}
    assert len(labels) - len(expected) < seq_len


def test_held_out_text_never_reaches_training(here: Path, make_context) -> None:
    for number in range(12):
        Path(f"{number:02}.txt").write_text(chr(ord("a") + number) * 9)
    documents = Text(path=".", held_out_every=5).build(make_context())
    data = TrainingWindows(documents, 4, Concatenate())
    trained = {id_ for i in range(len(data)) for row in data[i].values() for id_ in row.tolist()}
    held = {id_ for i in range(len(data.held_out)) for row in data.held_out[i].values() for id_ in row.tolist()}
    assert held - {END, -100} == set(b"afk")
    assert trained - {END} == set(b"abcdefghijkl") - set(b"afk")


def test_bytes_per_token_is_of_the_held_out_split_and_counts_each_end_of_text(tmp_path: Path) -> None:
    data = sequences(tmp_path, ["äöü", "training", "", "more training"], seq_len=4, every=4)
    assert data.bytes_per_token == data.held_out.bytes_per_token == 6 / 7


def test_nothing_held_out_means_no_held_out_dataset(tmp_path: Path) -> None:
    data = sequences(tmp_path, ["some", "text"], seq_len=4)
    assert data.held_out is None
    assert data.bytes_per_token is None


@pytest.mark.parametrize("index", [-1, 2, 100])
def test_an_index_out_of_range_is_an_error(tmp_path: Path, index: int) -> None:
    data = sequences(tmp_path, ["12345678"], seq_len=4)
    with pytest.raises(IndexError, match=f"sequence {index} of 2"):
        data[index]


def test_sequences_are_plain_int64_arrays_apart_from_the_map(tmp_path: Path) -> None:
    sample = sequences(tmp_path, ["12345678"], seq_len=4)[0]
    assert {(type(row), row.dtype, row.shape) for row in sample.values()} == {(np.ndarray, np.dtype("int64"), (4,))}
    sample["input_ids"][:] = 0  # a copy: files are mapped read-only


def test_a_pickled_dataset_carries_no_tokens(tmp_path: Path) -> None:
    data = sequences(tmp_path, ["held out", "x" * 100_000], seq_len=4, every=2)
    pickled = pickle.dumps(data)
    copy = pickle.loads(pickled)
    assert len(pickled) < 2000
    assert copy[7]["labels"].tolist() == data[7]["labels"].tolist()
    assert copy.held_out[0]["labels"].tolist() == data.held_out[0]["labels"].tolist()


@pytest.mark.parametrize(("vocab_size", "width"), [(65536, 2), (65537, 4)])
def test_ids_take_two_bytes_where_the_vocabulary_allows_and_four_otherwise(
    tmp_path: Path, vocab_size: int, width: int
) -> None:
    class Wide(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [self.vocab_size - 1, *super().encode(text)]

    tokenizer = Wide()
    tokenizer.vocab_size = vocab_size
    corpus = FakeCorpus(["abcdef"], Split())
    info = tokens.write_tokens(tmp_path, corpus, tokenizer)
    assert (tmp_path / "train.bin").stat().st_size == HEADER.size + 8 * width
    documents = tokens.open_documents(CachedFolder(tmp_path, info), corpus.describe(), lambda: corpus)
    assert documents.tokens(0, 4).tolist() == [vocab_size - 1, *b"abc"]


@pytest.mark.parametrize("wrong", [END, 257, -1])
def test_an_id_that_text_must_not_have_is_an_error_that_names_the_document(tmp_path: Path, wrong: int) -> None:
    class Wrong(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [1, wrong]

    with pytest.raises(ForgeError, match=naming("1.txt", f"id {wrong}", "[0, 257)")):
        tokens.write_tokens(tmp_path, FakeCorpus(["", "text"], Split()), Wrong())


def test_a_very_long_document_is_encoded_in_pieces_and_stays_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "PART_CHARACTERS", 10)
    text = "one\ntwo three\n\n" + "x" * 35 + "\nend"
    cut = [piece.text for piece in tokens.text_parts([(Document("a", "a", text), False)])]
    assert "".join(cut) == text
    assert max(map(len, cut)) == 10
    assert cut[:2] == ["one", "\ntwo three"]
    info = tokens.write_tokens(tmp_path, FakeCorpus([text, "b"], Split()), ByteTokenizer())
    assert info["train"] == {"documents": 2, "tokens": len(text) + 3, "bytes": len(text) + 1}
    documents = TokenFile(tmp_path / "train")
    assert documents.tokens(0, len(documents)).tolist() == stream([text, "b"])
    assert documents.ends().tolist() == [len(text) + 1, len(text) + 3]


def test_batches_are_bounded_in_characters_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "BATCH_CHARACTERS", 10)
    monkeypatch.setattr(tokens, "BATCH_PARTS", 3)
    pieces = [tokens.TextPart("x" * n, False, True, "a") for n in (1, 1, 1, 1, 20, 4, 5)]
    assert [[len(piece.text) for piece in batch] for batch in tokens.batches(pieces)] == [[1, 1, 1], [1, 20], [4, 5]]
