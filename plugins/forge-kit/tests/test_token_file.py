"""Token files: what is written is read, and nothing else is."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge_core.contracts.data import Documents
from forge_core.contracts.errors import ForgeError
from forge_kit.data.token_file import TokenFile, TokenFileWriter, read_header
from forge_testing.refusals import naming, refuses

END = 9


def write(stem: Path, documents: list[list[int]], vocab_size: int = 100, masks: list[list[bool]] | None = None):
    with TokenFileWriter(stem, vocab_size, END, learned=masks is not None) as writer:
        for number, ids in enumerate(documents):
            learned = None if masks is None else np.array(masks[number], dtype=bool)
            writer.add(f"document {number}", ids, text_bytes=3 * len(ids), learned=learned)
    return TokenFile(stem)


ids = st.integers(0, 99).filter(lambda id_: id_ != END)


@given(st.lists(st.lists(ids, max_size=6), max_size=6), st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_slice_is_that_of_all_documents_each_with_its_end(tmp_path: Path, documents: list[list[int]], data) -> None:
    file = write(tmp_path / "corpus", documents)
    whole = [id_ for document in documents for id_ in (*document, END)]
    start, stop = sorted(data.draw(st.lists(st.integers(0, len(whole)), min_size=2, max_size=2)))
    assert len(file) == len(whole)
    assert file.tokens(start, stop).tolist() == whole[start:stop]
    assert file.tokens(start, stop).dtype == np.int64
    assert file.ends().tolist() == np.cumsum([len(document) + 1 for document in documents]).tolist()
    assert file.learned(start, stop) is None


def test_the_protocol_is_followed_and_a_pickled_copy_reads_the_same(tmp_path: Path) -> None:
    file = write(tmp_path / "corpus", [[1, 2, 3]] * 500)
    assert isinstance(file, Documents)
    copy = pickle.loads(pickle.dumps(file))
    assert len(pickle.dumps(file)) < 500
    assert copy.tokens(0, 2000).tolist() == file.tokens(0, 2000).tolist()
    assert copy.bytes_per_token == 9 / 4


def test_masks_are_kept_and_the_end_is_learned_with_the_token_before_it(tmp_path: Path) -> None:
    file = write(tmp_path / "chat", [[1, 2], [3], []], masks=[[False, True], [False], []])
    assert file.learned(0, len(file)).tolist() == [False, True, True, False, False, False]


def test_a_document_may_come_in_parts(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "long", 100, END) as writer:
        writer.add("long", [1, 2], is_last=False)
        writer.add("long", [3])
    file = TokenFile(tmp_path / "long")
    assert file.tokens(0, 4).tolist() == [1, 2, 3, END]
    assert file.ends().tolist() == [4]


@pytest.mark.parametrize(("vocab_size", "width"), [(65536, 2), (65537, 4)])
def test_ids_take_two_bytes_where_the_vocabulary_allows(tmp_path: Path, vocab_size: int, width: int) -> None:
    file = write(tmp_path / "corpus", [[vocab_size - 1]], vocab_size)
    assert read_header(tmp_path / "corpus").width == width
    assert file.tokens(0, 1).tolist() == [vocab_size - 1]


@pytest.mark.parametrize("wrong", [END, 100, -1])
def test_an_id_that_no_text_has_is_refused_with_the_document(tmp_path: Path, wrong: int) -> None:
    with pytest.raises(ForgeError, match=naming("document 1", f"id {wrong}", "[0, 100)")):
        write(tmp_path / "corpus", [[1], [2, wrong]])


def damage(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_what_was_not_written_to_the_end_is_no_token_file(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=naming("id 100")):
        write(tmp_path / "corpus", [[1, 2], [100]])
    with refuses("", "corpus.bin", "FORGETOK"):
        TokenFile(tmp_path / "corpus")


def test_damage_is_named(tmp_path: Path) -> None:
    stem = tmp_path / "corpus"
    write(stem, [[1, 2, 3]])
    os.truncate(f"{stem}.ends", 4)
    with refuses("", "corpus.ends", "4 bytes", 8, "1 entries"):
        TokenFile(stem)
    os.truncate(f"{stem}.bin", 70)
    with refuses("", "corpus.bin", "70 bytes", 72, "4 tokens"):
        TokenFile(stem)
    damage(Path(f"{stem}.bin"), 8, b"\x07")
    with refuses("", "corpus.bin", "format 7", "2 bytes", "format 1"):
        TokenFile(stem)
    with refuses("", "elsewhere.bin", "No such file"):
        TokenFile(tmp_path / "elsewhere")
