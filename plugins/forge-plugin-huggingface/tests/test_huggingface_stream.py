"""Streams: every row in one lane, every lane continued from any document."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge_core.data.packing import Concatenate
from forge_kit.data.document_streams import DocumentStream, StreamedDocument, StreamWindows
from forge_plugin_huggingface import HuggingFace
from forge_testing.refusals import lacks, refuses

FORMATS = ["jsonl", "parquet", "saved"]
PER_FILE = (19, 13, 5, 7, 11, 8, 21, 2)
"""Rows of each file."""
EMPTY = {0, 7, 11, 20, 33, 58}
"""Rows without text, numbered through."""


def files_of(count: int) -> list[list[dict[str, Any]]]:
    """Files whose rows are numbered through."""
    numbers = iter(range(1000))
    return [
        [{"text": "" if number in EMPTY else f"{number}", "id": number} for number in islice(numbers, rows)]
        for rows in PER_FILE[:count]
    ]


def not_empty(count: int) -> list[int]:
    return [number for number in range(sum(PER_FILE[:count])) if number not in EMPTY]


def number_of(document: StreamedDocument) -> int:
    assert document.tokens[-1] == 256
    assert document.learned is None
    return int(bytes(document.tokens[:-1].tolist()))


def through_json(position: Any) -> Any:
    return json.loads(json.dumps(position))


def epoch_of(stream: Any, lane: int, epoch: int = 0) -> list[int]:
    """The documents of an epoch of a lane."""
    found = []
    for document in stream.read(lane, None):
        if document.position["epoch"] > epoch:
            return found
        if document.position["epoch"] == epoch:
            found.append(number_of(document))
    raise AssertionError("a lane has no end")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], str]:
    """The folder with so many files of a format, written once."""
    import datasets

    made: dict[tuple[str, int], str] = {}

    def folder(format_: str, count: int) -> str:
        if (format_, count) not in made:
            path = tmp_path_factory.mktemp(f"{format_}-{count}")
            made[format_, count] = str(path)
            for number, rows in enumerate(files_of(count)):
                if format_ == "jsonl":
                    (path / f"part-{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))
                elif format_ == "parquet":
                    dataset = datasets.Dataset.from_list(rows)
                    dataset.to_parquet(str(path / f"part-{number}.parquet"), batch_size=8)
            if format_ == "saved":
                rows = [row for rows in files_of(count) for row in rows]
                datasets.Dataset.from_list(rows).save_to_disk(str(path), num_shards=3)
        return made[format_, count]

    return folder


@pytest.fixture
def stream(folders, build_dataset) -> Callable[..., Any]:
    """Opens a stream: format, number of files, lanes, keys -> it. It has no state, so a test may open it once."""

    @cache
    def open_(format_: str = "jsonl", files: int = 3, lanes: int = 2, **keys: Any) -> Any:
        return build_dataset(folders(format_, files), rows=840, streaming=True, lanes=lanes, **keys)

    return open_


# --- lanes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [1, 3, 8])
@pytest.mark.parametrize("format_", FORMATS)
def test_every_document_is_in_one_lane_and_none_is_lost(stream, format_: str, files: int) -> None:
    for lanes in range(1, 9):
        opened = stream(format_, files, lanes, shuffle=6 if lanes % 3 else 0)
        found = [number for lane in range(lanes) for number in epoch_of(opened, lane)]
        assert sorted(found) == not_empty(files), lanes


def test_lanes_that_divide_the_files_read_files_of_their_own(stream) -> None:
    files = [[row["id"] for row in rows if row["text"]] for rows in files_of(8)]
    opened = stream(files=8, lanes=4)
    for lane in range(4):
        assert epoch_of(opened, lane) == [*files[lane], *files[lane + 4]]


def test_lanes_of_a_table_read_stretches_of_it(stream) -> None:
    opened = stream("saved", files=3, lanes=2)
    total = sum(PER_FILE[:3])
    assert epoch_of(opened, 0) == [n for n in not_empty(3) if n < total // 2]
    assert epoch_of(opened, 1) == [n for n in not_empty(3) if n >= total // 2]


def test_lanes_of_one_file_take_turns_at_its_rows(stream) -> None:
    opened = stream(files=1, lanes=2)
    assert epoch_of(opened, 0) == [2, 4, 6, 8, 10, 12, 14, 16, 18]
    assert epoch_of(opened, 1) == [1, 3, 5, 9, 13, 15, 17]


def test_files_of_one_row_are_shared_out_too(write, build_dataset) -> None:
    folder = write("jsonl", *[[{"text": f"{number}"}] for number in range(1, 8)])
    opened = build_dataset(folder, rows=4, streaming=True)
    assert [epoch_of(opened, lane) for lane in range(4)] == [[1, 5], [2, 6], [3, 7], [4]]


def test_by_default_every_row_of_the_batch_is_a_lane(folders, build_dataset) -> None:
    opened = build_dataset(folders("jsonl", 3), rows=6, streaming=True)
    assert opened.lanes == 6
    assert isinstance(opened, DocumentStream)


def test_files_that_lanes_share_are_warned_of(stream, caplog: pytest.LogCaptureFixture) -> None:
    stream(files=8, lanes=4)
    assert not caplog.records
    stream(files=3, lanes=6)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert not lacks(record.message, "6 lanes", "3 files", "2 times", "`lanes`")


def test_files_without_rows_are_named(write, build_dataset) -> None:
    folder = write("jsonl", [])
    with refuses("path", repr(folder), "no rows"):
        build_dataset(folder)


def test_a_lane_without_documents_is_an_error(stream) -> None:
    opened = stream(files=1, lanes=20)
    with refuses("", "lane 19 of 20", "1 files", "`lanes`", "streaming = false"):
        next(opened.read(19, None))


# --- epochs and order ------------------------------------------------------------------------------------------------


def test_epochs_follow_each_other_without_end(stream) -> None:
    found = [number_of(document) for document in islice(stream(files=1, lanes=1).read(0, None), 40)]
    assert found == [*not_empty(1), *not_empty(1), *not_empty(1)[:8]]


def test_without_shuffling_documents_come_as_they_stand_in_the_files(stream) -> None:
    for format_ in FORMATS:
        opened = stream(format_, files=3, lanes=1)
        assert epoch_of(opened, 0, 0) == epoch_of(opened, 0, 1) == not_empty(3)


def test_shuffling_goes_block_by_block_and_file_by_file(stream) -> None:
    found = epoch_of(stream(files=8, lanes=1, shuffle=1), 0)
    files = [[row["id"] for row in rows if row["text"]] for rows in files_of(8)]
    order = sorted(range(8), key=lambda file: found.index(files[file][0]))
    assert order != list(range(8))
    assert found == [number for file in order for number in files[file]]


def test_every_epoch_lane_and_seed_has_an_order_of_its_own_and_the_same_again(stream) -> None:
    def orders(seed: int) -> list[tuple[int, ...]]:
        opened = stream("saved", files=8, lanes=2, shuffle=200, seed=seed)
        relative = {lane: sorted(epoch_of(opened, lane)) for lane in (0, 1)}
        found = [(lane, epoch_of(opened, lane, epoch)) for lane in (0, 1) for epoch in (0, 1)]
        return [tuple(relative[lane].index(number) for number in order) for lane, order in found]

    one, two = orders(1), orders(2)
    assert len({*one, *two}) == 8
    assert orders(1) == one


# --- resuming --------------------------------------------------------------------------------------------------------


@given(
    format_=st.sampled_from(FORMATS),
    files=st.sampled_from([1, 3, 8]),
    lanes=st.integers(1, 4),
    shuffle=st.sampled_from([0, 1, 6, 50]),
    every=st.sampled_from([0, 3]),
    data=st.data(),
)
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_lane_continues_at_any_document(stream, format_, files, lanes, shuffle, every, data) -> None:
    held_out = {"held_out_every": every, "held_out_documents": 2} if every else {}
    opened = stream(format_, files, lanes, shuffle=shuffle, **held_out)
    lane, at = data.draw(st.integers(0, lanes - 1)), data.draw(st.integers(0, 50))
    documents = list(islice(opened.read(lane, None), 60))
    continued = opened.read(lane, through_json(documents[at].position))
    for expected, found in zip(documents[at:], continued, strict=False):
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.position == expected.position


@pytest.mark.parametrize("format_", FORMATS)
def test_windows_continue_in_the_middle_of_a_document(stream, format_: str) -> None:
    def samples(position: Any, count: int) -> list[tuple[list[int], Any]]:
        windows = StreamWindows(stream(format_, files=3, lanes=2, shuffle=4), 7, Concatenate())
        return [(sample["input_ids"].tolist(), place) for sample, place in islice(windows.read(1, position), count)]

    whole = samples(None, 30)
    assert len({len(ids) for ids, _ in whole}) == 1
    for at in (0, 1, 13, 24):
        assert samples(through_json(whole[at][1]), 5) == whole[at + 1 : at + 6]


def test_a_position_of_other_lanes_blocks_or_files_is_refused(stream) -> None:
    position = next(stream(files=8, lanes=4, shuffle=6).read(0, None)).position
    for changed in ({"lanes": 2}, {"shuffle": 5}, {"files": 3}, {"held_out_every": 2}):
        opened = stream(**{"files": 8, "lanes": 4, "shuffle": 6, "held_out_documents": 4} | changed)
        [(name, value)] = changed.items()
        before = "files = 8, lanes = 4, shuffle = 6, held_out_every = 0"
        with refuses("", before, f"{name} = {value}"):
            next(opened.read(0, position))


def test_data_that_is_not_what_was_read_before_is_warned_of_once(
    write, build_dataset, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"text": f"{number}"} for number in range(1, 9)]
    position = next(build_dataset(write("jsonl", rows), rows=2, streaming=True, lanes=1).read(0, None)).position
    opened = build_dataset(write("jsonl", [*rows, {"text": "9"}]), rows=2, streaming=True, lanes=1)
    for _ in range(2):
        assert number_of(next(opened.read(0, position))) == 1
    [record] = caplog.records
    assert not lacks(record.message, "'train'")


def test_passing_over_rows_does_not_decode_them(write, build_dataset, letters) -> None:
    folder = write("jsonl", [{"text": f"{number}"} for number in range(1, 1001)])
    opened = build_dataset(folder, rows=1, streaming=True)
    *_, last = islice(opened.read(0, None), 990)
    before = letters.encoded
    assert number_of(next(opened.read(0, last.position))) == 990
    assert letters.encoded - before <= 16


def test_a_copy_for_another_process_reads_the_same(stream) -> None:
    for format_ in FORMATS:
        opened = stream(format_, files=3, lanes=2, shuffle=6)
        copy = pickle.loads(pickle.dumps(opened))
        assert epoch_of(copy, 1) == epoch_of(opened, 1)


class _Lane(torch.utils.data.Dataset):
    def __init__(self, opened: Any) -> None:
        self._opened = opened

    def __getitem__(self, lane: int) -> list[int]:
        return epoch_of(self._opened, lane)


def test_a_worker_process_reads_whole_lanes(stream) -> None:
    opened = stream(files=8, lanes=4)
    loader = torch.utils.data.DataLoader(_Lane(opened), sampler=range(4), batch_size=None, num_workers=2)
    assert list(loader) == [epoch_of(opened, lane) for lane in range(4)]


# --- held out --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("format_", FORMATS)
def test_every_nth_row_of_a_file_is_held_out_and_the_first_are_evaluated_on(
    stream, texts_of, format_: str, lanes: int
) -> None:
    opened = stream(format_, files=3, lanes=lanes, held_out_every=2, held_out_documents=12)
    files = [[row["id"] for row in rows] for rows in files_of(3)] if format_ != "saved" else [list(range(37))]
    training = [number for rows in files for row, number in enumerate(rows) if row % 2 and number not in EMPTY]
    found = [number for lane in range(lanes) for number in epoch_of(opened, lane)]
    assert sorted(found) == sorted(training)
    first = [number for rows in files for row, number in enumerate(rows) if row % 2 == 0][:12]
    assert list(map(int, texts_of(opened.held_out))) == [number for number in first if number not in EMPTY]


def test_a_split_may_be_held_out_and_is_read_no_further_than_necessary(write, build_dataset, texts_of, letters) -> None:
    folder = write("jsonl", [{"text": f"{n}"} for n in range(1, 5)], [{"text": f"{n}"} for n in range(5, 3000)])
    splits = {"train": "part-0.jsonl", "test": "part-1.jsonl"}
    keys = {"rows": 2, "streaming": True, "data_files": splits, "held_out_split": "test"}
    opened = build_dataset(folder, held_out_documents=3, **keys)
    assert texts_of(opened.held_out) == ["5", "6", "7"]
    assert letters.encoded == 3
    assert texts_of(build_dataset(folder, held_out_documents=3, **keys).held_out) == ["5", "6", "7"]
    assert letters.encoded == 3
    assert len(texts_of(build_dataset(folder, **keys).held_out)) == 2995
    assert sorted(epoch_of(opened, 0) + epoch_of(opened, 1)) == [1, 2, 3, 4]


def test_a_stream_without_held_out_rows_has_none(stream) -> None:
    assert stream().held_out is None


@pytest.mark.parametrize("format_", FORMATS)
def test_a_row_that_is_no_text_is_an_error_that_names_it(write, build_dataset, format_: str) -> None:
    folder = write(format_, [{"text": 1}, {"text": 2}])
    with refuses("", "row 1", repr(folder), "'train'", "'text'", "int '2'"):
        next(build_dataset(folder, rows=2, streaming=True).read(1, None))


def test_streams_and_tables_of_the_same_data_give_the_same_tokens(folders, build_dataset, stream) -> None:
    whole = build_dataset(folders("parquet", 3))
    streamed = islice(stream("parquet", files=3, lanes=1).read(0, None), len(not_empty(3)))
    tokens = np.concatenate([document.tokens for document in streamed])
    assert tokens.tolist() == whole.tokens(0, len(whole)).tolist()


def test_lanes_and_shuffling_cannot_change_in_a_run() -> None:
    import attrs

    fields: Iterator[Any] = (getattr(attrs.fields(HuggingFace), name) for name in ("lanes", "shuffle"))
    assert [field.metadata["when_resumed"] for field in fields] == ["impossible", "impossible"]


@pytest.mark.parametrize("shuffle", [0, 8])
@pytest.mark.parametrize("change", ["the last rows are gone", "a row before is gone", "the row itself has changed"])
def test_a_file_that_lost_rows_is_refused_when_a_run_continues(write, build_dataset, shuffle: int, change: str) -> None:
    """Reading on at the same number would leave out rows, or repeat them, without a word."""
    rows = [{"text": f"{number}"} for number in range(40)]
    opened = build_dataset(write("jsonl", rows), rows=1, streaming=True, shuffle=shuffle)
    *_, last = islice(opened.read(0, None), 30)
    assert number_of(next(opened.read(0, last.position))) == number_of(last)
    start = last.position["row"]
    changed = {
        "the last rows are gone": rows[:start],
        "a row before is gone": [*rows[:3], *rows[4:]],
        "the row itself has changed": [*rows[:start], {"text": "x"}, *rows[start + 1 :]],
    }[change]
    folder = write("jsonl", changed)
    again = build_dataset(folder, rows=1, streaming=True, shuffle=shuffle)
    with refuses("", repr(folder), "'train'", "file 0", f"row {start}"):
        next(again.read(0, last.position))
