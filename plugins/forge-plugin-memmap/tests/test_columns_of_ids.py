"""Columns of ids in Parquet, Arrow and JSON lines: unpacked once, and then read like other token files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from forge_core.contracts.errors import JobError, Problem
from forge_plugin_memmap import unpacking
from forge_plugin_memmap.formats import Arrow, JsonLines, Parquet, json_lines
from forge_plugin_memmap.formats import parquet as parquet_format
from forge_plugin_memmap.formats.reading import read_shard
from forge_plugin_memmap.unpacking import unpacked
from forge_testing.processes import exit_code_of_fork
from forge_testing.refusals import at, check_problems, refuses

Find = Callable[..., list[Problem]]
DOCUMENTS = [[5, 6, 7], [8], [], [9, 300, 11, 12], [13, 0]]
"""One without tokens, and none but the last with an end-of-text."""
MASKS = [[True, False, True], [False], [], [True, True, False, False], [True, True]]
IDS = [id_ for ids in DOCUMENTS for id_ in ids]
ENDS = [3, 4, 8, 10]
LEARNED = [bit for mask in MASKS for bit in mask]


INT32 = pa.list_(pa.int32())


def table(kind: pa.DataType = INT32, documents: list[list[int]] = DOCUMENTS) -> pa.Table:
    columns = {"text": ["a"] * len(documents), "input_ids": pa.array(documents, kind)}
    return pa.table(
        columns | {"loss_mask": pa.array(MASKS, pa.list_(pa.bool_()))} if documents is DOCUMENTS else columns
    )


def write_parquet(path: str, content: pa.Table) -> None:
    parquet.write_table(content, path, row_group_size=2, write_page_checksum=True)


def write_arrow(path: str, content: pa.Table) -> None:
    with pa.OSFile(path, "wb") as file, ipc.new_file(file, content.schema) as writer:
        writer.write_table(content, max_chunksize=2)


def write_stream(path: str, content: pa.Table) -> None:
    with pa.OSFile(path, "wb") as file, ipc.new_stream(file, content.schema) as writer:
        writer.write_table(content, max_chunksize=2)


def write_json(path: str, content: pa.Table) -> None:
    Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in content.to_pylist()))


WRITERS = {"a.parquet": write_parquet, "file.arrow": write_arrow, "stream.arrow": write_stream, "a.jsonl": write_json}
FORMATS = {"a.parquet": Parquet, "file.arrow": Arrow, "stream.arrow": Arrow, "a.jsonl": JsonLines}


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that rows are read in several batches."""
    for module in (json_lines, parquet_format):
        monkeypatch.setattr(module, "ROWS", 2)


@pytest.mark.parametrize("name", WRITERS)
def test_rows_are_documents(name: str, open_documents: Callable[..., Any]) -> None:
    WRITERS[name](name, table())
    documents = open_documents(path=name, end_of_text=0)
    assert documents.tokens(0, 99).tolist() == IDS
    assert documents.ends().tolist() == ENDS
    assert documents.learned(0, 10) is None
    assert documents.where(3, 5) == f"tokens 3 to 5 of {os.getcwd()}/{name}"
    masked = open_documents(path=name, end_of_text=0, format=FORMATS[name](mask_column="loss_mask"))
    assert masked.learned(0, 10).tolist() == LEARNED
    assert masked.learned(2, 6).tolist() == LEARNED[2:6]
    assert masked.identity() != documents.identity()


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.uint16()), pa.large_list(pa.int64()), pa.list_(pa.int16()), pa.list_(pa.uint64())]
)
def test_any_list_of_integers_has_ids(kind: pa.DataType, open_documents: Callable[..., Any]) -> None:
    write_parquet("a.parquet", table(kind))
    assert open_documents(path="a.parquet", end_of_text=0).tokens(0, 99).tolist() == IDS


def test_rows_of_equal_length_may_be_a_fixed_size_list(open_documents: Callable[..., Any]) -> None:
    write_parquet("a.parquet", table(pa.list_(pa.int32(), 2), [[1, 2], [3, 4]]))
    documents = open_documents(path="a.parquet", end_of_text=0)
    assert (documents.tokens(0, 9).tolist(), documents.ends().tolist()) == ([1, 2, 3, 4], [2, 4])


def test_a_folder_may_mix_formats_and_splits_are_made_of_it(open_documents: Callable[..., Any]) -> None:
    os.mkdir("data")
    write_json("data/a.jsonl", table())
    np.save("data/b.npy", np.array([20, 0], np.uint16))
    write_parquet("data/c.parquet", table())
    documents = open_documents(path="data", end_of_text=0)
    assert documents.tokens(0, 99).tolist() == [*IDS, 20, 0, *IDS]
    assert documents.ends().tolist() == [*ENDS, 12, *(end + 12 for end in ENDS)]
    split = open_documents(path="data", end_of_text=0, held_out_every=3)
    assert split.held_out.tokens(0, 99).tolist() == [5, 6, 7, 13, 0, 8]
    assert len(split) + len(split.held_out) == 22


def test_files_are_unpacked_once_until_one_changes_and_a_killed_start_continues(
    open_documents: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        write_json(f"{number}.jsonl", table())
    monkeypatch.setattr("forge_kit.data.cache.SAVE_INTERVAL_S", 0.0)
    keys = {"path": "*.jsonl", "end_of_text": 0}
    unpack, read = unpacking._unpack, []

    def note(shard: Any, *more: Any) -> Any:
        read.append(Path(shard.path).name)
        return unpack(shard, *more)

    def end(shard: Any, *more: Any) -> Any:
        # By its name: the temporary folder may have a 2 as well
        return os._exit(7) if Path(shard.path).name == "2.jsonl" else unpack(shard, *more)

    with monkeypatch.context() as patch:
        patch.setattr(unpacking, "_unpack", end)
        assert exit_code_of_fork(lambda: open_documents(**keys)) == 7
    monkeypatch.setattr(unpacking, "_unpack", note)
    assert open_documents(**keys).tokens(0, 99).tolist() == IDS * 3
    assert open_documents(**keys).ends().tolist() == [end + first for first in (0, 10, 20) for end in ENDS]
    assert read == ["2.jsonl"]
    write_json("1.jsonl", table(documents=[[77]]))
    assert open_documents(**keys).tokens(0, 99).tolist() == [*IDS, 77, *IDS]


def _write(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


def _hold(**columns: Any) -> Callable[[Path], object]:
    return lambda path: write_parquet(str(path), pa.table(columns))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


TEXTS = '{"text": "a"}\n'
CHECKED = [
    ("a.parquet", _cut, ("a.parquet", "Parquet", "damaged")),
    ("file.arrow", _cut, ("file.arrow", "Arrow", "damaged")),
    ("stream.arrow", _cut, ("stream.arrow", "cut short")),
    ("a.jsonl", _cut, ("a.jsonl", "last line", "cut short")),
    ("a.jsonl", _write(TEXTS), ("a.jsonl", "json_lines", "'input_ids'", "text", "column")),
    ("a.parquet", _hold(text=["a"]), ("a.parquet", "'input_ids'", "text")),
    ("a.parquet", _hold(input_ids=[[0.5]]), ("a.parquet", "'input_ids'")),
]


@pytest.mark.parametrize(("name", "damage", "facts"), CHECKED)
def test_damage_and_missing_columns_are_named_by_the_check(
    name: str, damage: Callable[[Path], object], facts: tuple[str, ...], problems: Find
) -> None:
    WRITERS[name](name, table())
    damage(Path(name))
    check_problems(problems(path=name, end_of_text=0), at("path", *facts))


ROWS = [
    ([[1, -2]], ("a.jsonl", "id -2")),
    ([[1, 1 << 32]], ("a.jsonl", f"id {1 << 32}", "below")),
    ([[1], [2.5]], ("a.jsonl:2", "'input_ids'", "integers")),
    ([[1], None], ("a.jsonl:2", "'input_ids'", "integers")),
    ([[1], [[2]]], ("a.jsonl:2", "'input_ids'", "integers")),
    ([[], []], ("a.jsonl", "no tokens")),
]


@pytest.mark.parametrize(("rows", "facts"), ROWS)
def test_what_is_no_list_of_ids_ends_the_start(
    rows: list[Any], facts: tuple[str, ...], open_documents: Callable[..., Any]
) -> None:
    Path("a.jsonl").write_text("".join(f"{json.dumps({'input_ids': row})}\n" for row in rows))
    with refuses("", *facts):
        open_documents(path="a.jsonl", end_of_text=0)


def test_nulls_and_masks_of_another_length_end_the_start(open_documents: Callable[..., Any]) -> None:
    write_parquet("a.parquet", pa.table({"input_ids": pa.array([[1], None], pa.list_(pa.int32()))}))
    with refuses("", "a.parquet", "null"):
        open_documents(path="a.parquet", end_of_text=0)
    masks = pa.array([[True], [True]], pa.list_(pa.bool_()))
    write_parquet("b.parquet", pa.table({"input_ids": [[1], [2, 3]], "loss_mask": masks}))
    with refuses("", "b.parquet", "row 2", "length"):
        open_documents(path="b.parquet", end_of_text=0, format=Parquet(mask_column="loss_mask"))


def test_ids_beyond_the_vocabulary_are_named_by_their_place_in_the_file(open_documents: Callable[..., Any]) -> None:
    write_json("a.jsonl", table(documents=[[1, 2]]))
    write_json("b.jsonl", table())
    with refuses("", f"{os.getcwd()}/b.jsonl", "token 5 is 300", "300 ids"):
        open_documents(path="*.jsonl", end_of_text=0, vocab_size=300)


def header(name: str, content: bytes) -> range:
    """The footer of Parquet and of an Arrow file; the schema at the beginning of a stream.

    Arrow has no sums: what describes the place of a batch in its file is not among them, since Arrow itself cannot
    tell a wrong place from a right one.
    """
    if name == "stream.arrow":
        return range(8 + int.from_bytes(content[4:8], "little"))
    length = int.from_bytes(content[-8:-4] if name == "a.parquet" else content[-10:-6], "little")
    return range(len(content) - length - (8 if name == "a.parquet" else 10), len(content))


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
def test_flipped_bytes_of_footers_and_headers_are_errors_or_change_nothing(name: str) -> None:
    WRITERS[name](name, table())
    original = Path(name).read_bytes()
    random = np.random.default_rng(0)
    caught = 0
    for place in random.choice(header(name, original), 120).tolist():
        content = bytearray(original)
        content[place] ^= int(random.integers(1, 256))
        Path(name).write_bytes(content)
        try:
            [shard] = unpacked([read_shard(name)])
            ids = np.fromfile(shard.path, shard.dtype, shard.tokens, offset=shard.offset).tolist()
            assert ids == IDS, place
            assert np.concatenate([*shard.ends.blocks()]).tolist() == ENDS, place
        except JobError:
            caught += 1
    assert caught > 30
