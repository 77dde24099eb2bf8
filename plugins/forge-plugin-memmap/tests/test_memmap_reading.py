"""Whatever the format and however many files: the tokens are those that were written."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge_core.contracts.data import Documents
from forge_core.contracts.errors import DataError
from forge_kit.data.token_file import TokenFileWriter
from forge_plugin_memmap import index, selection, shards
from forge_plugin_memmap.documents import ShardedDocuments
from forge_plugin_memmap.formats import Raw
from forge_plugin_memmap.formats.reading import read_shard
from forge_testing.refusals import naming, refuses

END = 9
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
ids = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is read in blocks is read in several."""
    monkeypatch.setattr(index, "BLOCK", 5)
    monkeypatch.setattr(shards, "BLOCK", 5)
    monkeypatch.setattr(selection, "BLOCK", 3)


def all_of(documents: Documents) -> list[int]:
    return documents.tokens(0, len(documents)).tolist()


def write_token_file(stem: str, documents: list[list[int]], masks: list[list[bool]] | None = None) -> None:
    with TokenFileWriter(Path(stem), 100, END, learned=masks is not None) as writer:
        for number, found in enumerate(documents):
            mask = None if masks is None else np.array(masks[number])
            writer.add("document", found, text_bytes=3 * len(found), learned=mask)


# --- slices ------------------------------------------------------------------------------------------------------


@given(parts=st.lists(ids, min_size=1, max_size=5), data=st.data())
@same_folder
def test_a_slice_across_shards_is_that_of_all_tokens_in_a_row(here: Path, parts: list[list[int]], data: Any) -> None:
    for number, part in enumerate(parts):
        np.save(here / f"{number}.npy", np.array(part, data.draw(st.sampled_from(["<u2", ">i4", "|u1", "<i8"]))))
    documents = ShardedDocuments([read_shard(str(here / f"{n}.npy")) for n in range(len(parts))], END)
    whole = np.concatenate([np.array(part, np.int64) for part in parts])
    start, stop = sorted(data.draw(st.lists(st.integers(0, len(whole)), min_size=2, max_size=2)))
    found = documents.tokens(start, stop)
    assert found.dtype == np.int64
    assert found.tolist() == whole[start:stop].tolist()
    assert documents.tokens(start, len(whole) + 5).tolist() == whole[start:].tolist()
    assert len(documents) == len(whole)


def test_a_slice_is_a_copy(open_documents: Callable[..., Any]) -> None:
    np.save("a.npy", np.arange(8))
    documents = open_documents(path="a.npy", end_of_text=END)
    documents.tokens(0, 8)[:] = 0
    assert all_of(documents) == list(range(8))


def test_the_protocol_is_followed_and_a_pickled_copy_holds_paths_only(open_documents: Callable[..., Any]) -> None:
    np.save("a.npy", np.arange(10_000) % 10)
    documents = open_documents(path="a.npy", end_of_text=END, held_out_every=2)
    for part in (documents, documents.held_out):
        assert isinstance(part, Documents)
        assert len(pickle.dumps(part)) < 2000
        assert all_of(pickle.loads(pickle.dumps(part))) == all_of(part)


def test_where_names_the_files(open_documents: Callable[..., Any], here: Path) -> None:
    np.save("a.npy", np.array([1, 2, 3]))
    np.save("b.npy", np.array([4, END]))
    documents = open_documents(path=("a.npy", "b.npy"), end_of_text=END)
    assert documents.where(2, 5) == f"tokens 2 to 3 of {here}/a.npy and 0 to 2 of {here}/b.npy"


def test_a_file_that_is_cut_short_later_is_an_error_and_not_the_end_of_the_process(
    open_documents: Callable[..., Any], here: Path
) -> None:
    np.save("a.npy", np.arange(1000, dtype=np.uint16))
    documents = open_documents(path="a.npy", end_of_text=END)
    later = pickle.loads(pickle.dumps(documents))
    assert documents.tokens(0, 100).tolist() == list(range(100))
    with open("a.npy", "r+b") as file:
        file.truncate(500)
    assert documents.tokens(0, 100).tolist() == list(range(100))
    with pytest.raises(DataError, match=naming(f"{here}/a.npy", "500 bytes", 2128)):
        later.tokens(0, 100)
    with pytest.raises(DataError, match=naming(f"{here}/a.npy", 500, 1528)):
        documents.tokens(100, 700)
    Path("a.npy").unlink()
    with pytest.raises(DataError, match=naming(f"{here}/a.npy", "No such file")):
        later.tokens(0, 100)


# --- formats -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int16", "int32", "int64"])
def test_raw_files_are_read_as_the_type_that_is_written(open_documents: Callable[..., Any], dtype: str) -> None:
    np.arange(12).astype(np.dtype(dtype).newbyteorder("<")).tofile("a.bin")
    assert all_of(open_documents(path="a.bin", format=Raw(dtype=dtype), end_of_text=END)) == list(range(12))


def test_token_files_say_themselves_what_they_are(open_documents: Callable[..., Any]) -> None:
    write_token_file("a", [[1, 2], [3]])
    write_token_file("b", [[4]])
    documents = open_documents(path="*.bin")
    assert all_of(documents) == [1, 2, END, 3, END, 4, END]
    assert documents.end_of_text == END
    assert documents.bytes_per_token == 12 / 7
    assert documents.learned(0, 7) is None


def test_masks_of_some_shards_are_kept_and_others_are_learned_as_a_whole(open_documents: Callable[..., Any]) -> None:
    write_token_file("a", [[1, 2]], masks=[[False, True]])
    write_token_file("b", [[4]])
    documents = open_documents(path="*.bin")
    assert documents.learned(0, 5).tolist() == [False, True, True, True, True]
    assert documents.learned(1, 4).tolist() == [True, True, True]


def test_files_are_in_the_order_of_their_names_and_each_counts_once(open_documents: Callable[..., Any]) -> None:
    Path("data/deep").mkdir(parents=True)
    for number, name in enumerate(["data/b.npy", "data/a.npy", "data/deep/c.npy"]):
        np.save(name, np.array([number]))
    Path("data/link.npy").symlink_to("a.npy")
    Path("data/.hidden.npy").write_bytes(b"")
    Path("data/notes.txt").write_text("not data")
    assert all_of(open_documents(path=("data/b.npy", "data"), end_of_text=END)) == [1, 0, 2]


# --- documents ---------------------------------------------------------------------------------------------------


@given(parts=st.lists(ids, min_size=1, max_size=5))
@same_folder
def test_every_end_of_text_ends_a_document_and_so_does_the_last_token(here: Path, parts: list[list[int]]) -> None:
    parts = [[*part, END, 1] for part in parts]
    for number, part in enumerate(parts):
        np.save(here / f"{number}.npy", np.array(part))
    documents = ShardedDocuments([read_shard(str(here / f"{n}.npy")) for n in range(len(parts))], END)
    whole = [id_ for part in parts for id_ in part]
    expected = [place + 1 for place, id_ in enumerate(whole) if id_ == END or place == len(whole) - 1]
    assert documents.ends().tolist() == expected


def test_an_index_beside_a_file_is_taken_and_the_ids_are_not_searched(
    open_documents: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save("a.npy", np.array([1, END, 2, 3]))
    np.array([3, 4], "<i8").tofile("a.ends")
    np.save("b.npy", np.array([5, END, 6]))
    np.array([1, 2, 3], "<i8").tofile("b.ends")
    monkeypatch.setattr(index, "blocks", lambda shard: pytest.fail("it was searched"))
    assert open_documents(path=("a.npy", "b.npy"), end_of_text=END).ends().tolist() == [3, 4, 5, 6, 7]


def test_ends_are_searched_once_until_a_file_changes(
    open_documents: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save("a.npy", np.array([1, END, 2, END]))
    keys = {"path": "a.npy", "end_of_text": END}
    assert open_documents(**keys).ends().tolist() == [2, 4]
    with monkeypatch.context() as patched:
        patched.setattr(index, "blocks", lambda shard: pytest.fail("it was searched"))
        assert open_documents(**keys).ends().tolist() == [2, 4]
    np.save("a.npy", np.array([END, 1, 2, END]))
    assert open_documents(**keys).ends().tolist() == [1, 4]


@pytest.mark.parametrize(
    ("ends", "facts"),
    [
        ([3, 2, 4], ["a.ends", "ascend"]),
        ([1, 3], ["a.ends", 3, "a.npy", "4 tokens"]),
    ],
)
def test_a_damaged_index_is_an_error(open_documents: Callable[..., Any], ends: list[int], facts: list[object]) -> None:
    np.save("a.npy", np.array([1, 2, 3, 4]))
    np.array(ends, "<i8").tofile("a.ends")
    with refuses("", *facts):
        open_documents(path="a.npy", end_of_text=END).ends()


def test_an_end_of_text_that_never_occurs_is_an_error_once_documents_matter(open_documents: Callable[..., Any]) -> None:
    np.save("a.npy", np.array([1, 2, 3, 4]))
    documents = open_documents(path="a.npy", end_of_text=END)
    assert all_of(documents) == [1, 2, 3, 4]
    with refuses("", "4 ids", "a.npy", 9, "end_of_text", ".ends"):
        documents.ends()


# --- held out ----------------------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 5), min_size=2, max_size=14), every=st.integers(2, 5), data=st.data())
@same_folder
def test_every_nth_document_is_held_out_and_the_others_are_trained_on(
    here: Path, lengths: list[int], every: int, data: Any
) -> None:
    ends, tokens = np.cumsum(lengths), np.arange(sum(lengths))
    np.save(here / "a.npy", tokens)
    ends.astype("<i8").tofile(here / "a.ends")
    base = ShardedDocuments([read_shard(str(here / "a.npy"))], END)
    documents = selection.split_documents(base, every, [lengths])
    parts = np.split(tokens, ends[:-1])
    for chosen, first in ((documents, False), (documents.held_out, True)):
        wanted = [part for number, part in enumerate(parts) if (number % every == 0) == first]
        whole = np.concatenate(wanted).tolist()
        start, stop = sorted(data.draw(st.lists(st.integers(0, len(whole)), min_size=2, max_size=2)))
        assert chosen.tokens(start, stop).tolist() == whole[start:stop]
        assert chosen.ends().tolist() == np.cumsum([len(part) for part in wanted]).tolist()
        assert len(chosen) == len(whole)


def test_masks_are_split_with_their_documents(open_documents: Callable[..., Any]) -> None:
    write_token_file("a", [[1], [2, 3], [4]], masks=[[False], [False, True], [True]])
    documents = open_documents(path="a.bin", held_out_every=2)
    assert documents.learned(0, 3).tolist() == [False, True, True]
    assert documents.held_out.learned(0, 4).tolist() == [False, False, True, True]


def test_other_files_can_be_held_out(open_documents: Callable[..., Any]) -> None:
    np.save("a.npy", np.array([1, END]))
    np.save("b.npy", np.array([2, END]))
    documents = open_documents(path="a.npy", held_out_path="b.npy", end_of_text=END)
    assert (all_of(documents), all_of(documents.held_out)) == ([1, END], [2, END])


def test_a_single_document_cannot_be_split(open_documents: Callable[..., Any]) -> None:
    np.save("a.npy", np.array([1, END]))
    with refuses("", "held_out_every = 2", "single document"):
        open_documents(path="a.npy", end_of_text=END, held_out_every=2)
