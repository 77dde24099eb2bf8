"""Parts of `data prepare`, done in any order, killed and done again: joined, they are the bytes of one command."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from forge_core.contracts.errors import JobError
from forge_plugin_memmap.manifest import read_prepared
from forge_plugin_memmap.prepare import documents, inputs, join, parquet_files, parts, run, text_files
from forge_plugin_memmap.prepare.documents import Fields
from forge_plugin_memmap.prepare.inputs import InputPosition, find_inputs, read_chunks
from forge_plugin_memmap.prepare.part_range import Part
from forge_testing.refusals import lacks

Prepare = Callable[..., str]
TOKENIZER = "--tokenizer=./letters.py:Letters"
NAMES = ("a.jsonl", "b.txt", "c.jsonl.gz", "d.parquet", "e.txt")
COMMON = ("--held-out-every=4", "--shard-tokens=150", "--errors=skip")
ARGUMENTS = (*NAMES, *COMMON)


@pytest.fixture(autouse=True)
def input_files(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of every format, in small chunks, with lines, rows and a file that are dropped."""
    monkeypatch.setattr(inputs, "CHUNK", 60)
    for module in (text_files, parquet_files):
        monkeypatch.setattr(module, "BLOCK", 32)
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 16)
    monkeypatch.setattr(join, "TOKENS_AT_ONCE", 100)
    monkeypatch.setattr(run, "SAVE_EVERY_S", 0)
    found = [f"document {number} " * (number % 7) for number in range(40)]
    ids = [f"é{number}" if number % 3 else None for number in range(40)]
    lines = [json.dumps({"text": text, "id": id_}) for text, id_ in zip(found, ids, strict=True)]
    lines[23] = '{"body": "no text"}'
    Path("a.jsonl").write_text("\ufeff" + "\n".join([*lines, "not JSON"]) + "\n")
    Path("b.txt").write_text("a long text, line by line\n" * 12)
    Path("c.jsonl.gz").write_bytes(gzip.compress(Path("a.jsonl").read_bytes()))
    parquet.write_table(
        pa.table({"text": pa.array([*found, None]), "origin": pa.array([*map(str, range(40)), None])}),
        "d.parquet",
        row_group_size=7,
    )
    Path("e.txt").touch()


def content(folder: str = "data") -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


class Killed(BaseException):
    """Nothing but the process itself ends: no handler may tidy up."""


def killed(monkeypatch: pytest.MonkeyPatch, prepare: Prepare, call: int, *arguments: str) -> None:
    """A command whose process ends when its state is saved for the n-th time, or its last shard is finished."""
    with monkeypatch.context() as patched:
        original, calls = run._save, iter(range(10**6))

        def end(*given: Any) -> None:
            original(*given)
            if next(calls) == call:
                raise Killed

        patched.setattr(run, "_save", end)
        for module in (parts, join):
            patched.setattr(
                module, "finish_part" if module is parts else "finish", lambda *_: (_ for _ in ()).throw(Killed)
            )
        with pytest.raises(Killed):
            prepare(*arguments)


# --- the same bytes ----------------------------------------------------------------------------------------------


def test_parts_in_any_order_two_of_them_killed_are_joined_to_the_bytes_of_one_command(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(*ARGUMENTS, "--out=whole")
    assert len(list(Path("whole").glob("train-*.bin"))) > 5
    for count, order in ((1, [1]), (2, [2, 1]), (7, [4, 7, 1, 6, 3, 2, 5])):
        for number in order:
            arguments = (*ARGUMENTS, "--out=data", f"--part={number}/{count}")
            if number <= 2:
                killed(monkeypatch, prepare, 2 * number, *arguments)
            if number == 2:  # one goes on, the other is lost with its machine, and begins again
                shutil.rmtree(f"data/parts/2-of-{count}")
            prepare(*arguments)
        killed(monkeypatch, prepare, 5, *ARGUMENTS, "--out=data", "--join")
        prepare(*ARGUMENTS, "--out=data", "--join")
        assert content() == content("whole")
        shutil.rmtree("data")


def test_parts_without_a_document_change_nothing(prepare: Prepare) -> None:
    """Some of the parts have no document."""
    names = ("a.jsonl", "d.parquet", "e.txt")
    prepare(*names, *COMMON, "--out=whole")
    for number in range(1, 10):
        prepare(*names, *COMMON, "--out=data", f"--part={number}/9")
    prepare(*names, *COMMON, "--out=data", "--join", "--workers=2")
    assert content() == content("whole")


@given(
    lines=st.lists(st.sampled_from(["", "\r", "x" * 90, '{"text": "one"}', '{"text": "ä€😀"}\r']), max_size=9),
    ended=st.booleans(),
    count=st.integers(1, 6),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
def test_every_line_is_in_one_part_however_a_file_is_cut(
    tmp_path_factory: Any, lines: list[str], ended: bool, count: int
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    data = "\n".join(lines).encode() + b"\n" * ended
    for name in ("a.jsonl", "b.jsonl"):
        (folder / name).write_bytes(data)
    found = find_inputs([str(folder)], "text", folder / "out")
    pieces = []
    for number in range(1, count + 1):
        begin, end = Part(number, count).bounds(found)
        pieces += [item.data for chunk in read_chunks(found, Fields(), begin, end) for _, item in chunk.items]  # type: ignore[attr-defined]
    assert b"".join(pieces) == data * 2
    whole = [item.data for chunk in read_chunks(found, Fields(), InputPosition()) for _, item in chunk.items]  # type: ignore[attr-defined]
    assert b"".join(whole) == data * 2


def test_parts_are_about_equally_large(here: Path) -> None:
    Path("long.jsonl").write_text('{"text": "one"}\n' * 1000)
    found = find_inputs(["long.jsonl"], "text", Path("out"))
    for number in range(1, 8):
        begin, end = Part(number, 7).bounds(found)
        size = sum(len(item.data) for chunk in read_chunks(found, Fields(), begin, end) for _, item in chunk.items)  # type: ignore[attr-defined]
        assert abs(size - 16_000 / 7) <= 16


# --- what is told ------------------------------------------------------------------------------------------------


def test_a_part_tells_what_it_did_and_the_parts_are_gone_when_they_are_joined(prepare: Prepare, forge_run: Any) -> None:
    arguments = ("a.jsonl", "--out=data", "--errors=skip")
    out = prepare(*arguments, "--part=1/2")
    assert not lacks(out, "part 1/2 of data is finished", "documents", "tokens/s", "--join")
    assert "tokens/s" not in prepare(*arguments, "--part=1/2")  # it is not done again
    out = json.loads(prepare(*arguments, "--part=2/2", "--json"))
    assert out["part"] == "2/2"
    # Places in words, as on the terminal
    assert all(isinstance(each, str) for entry in out["dropped"].values() for each in entry["examples"])
    assert out["dropped"]
    assert (
        out["documents"]
        == json.loads(Path("data/parts/2-of-2/part.json").read_text())["splits"]["train"]["total"]["documents"]
    )
    assert 'type = "memmap"' in prepare(*arguments, "--join")
    assert not Path("data/parts").exists()
    assert 'type = "memmap"' in prepare(*arguments, "--join")
    # A script that is started again has nothing to do, and must not stop what depends on it
    assert not lacks(prepare(*arguments, "--part=1/2"), "part 1/2 of data is finished", "joined")
    out = json.loads(prepare(*arguments, "--part=1/2", "--json"))
    assert (out["part"], out["documents"]) == ("1/2", None)
    assert not Path("data/parts").exists()
    code, _, err = forge_run("data", "prepare", *arguments, TOKENIZER, "--part=1/2", "--shard-tokens=7")
    assert code == 2
    assert not lacks(err, "data was begun with other arguments", "shard_tokens")


def test_a_line_that_stops_a_part_is_named_from_where_the_part_begins(forge_run: Callable[..., Any]) -> None:
    lines = ['{"text": "one"}'] * 10 + ["not JSON"] + ['{"text": "two"}'] * 9
    Path("f.jsonl").write_text("\n".join(lines))
    arguments = ["f.jsonl", "--out=data", TOKENIZER, "--workers=1", "--part=2/3"]
    code, _, err = forge_run("data", "prepare", *arguments)
    assert code == 2
    assert err.startswith("f.jsonl:4 from byte 112: not JSON (")
    # As the place is meant
    assert Path("f.jsonl").read_bytes()[112:].splitlines()[3] == b"not JSON"


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.fixture
def done(prepare: Prepare) -> None:
    """All three parts, which are not joined yet."""
    for number in (1, 2, 3):
        prepare(*ARGUMENTS, "--out=data", f"--part={number}/3")


def refused(forge_run: Callable[..., Any], *arguments: str) -> str:
    code, _, err = forge_run("data", "prepare", *ARGUMENTS, "--out=data", TOKENIZER, "--workers=1", *arguments)
    assert code == 2
    assert not Path("data/manifest.json").exists()
    return err


def test_all_that_is_missing_or_was_not_finished_is_named(
    forge_run: Callable[..., Any], prepare: Prepare, monkeypatch: Any
) -> None:
    assert not lacks(refused(forge_run, "--join"), "data/parts", "--part 1/N")
    prepare(*ARGUMENTS, "--out=data", "--part=2/4")
    killed(monkeypatch, prepare, 2, *ARGUMENTS, "--out=data", "--part=3/4")
    rows = refused(forge_run, "--join").splitlines()
    assert [row for row in rows if "part 1/4 is missing" in row]
    assert [row for row in rows if "part 3/4 is not finished" in row]
    assert [row for row in rows if "part 4/4 is missing" in row]
    assert not [row for row in rows if "part 2/4" in row]
    prepare(*ARGUMENTS, "--out=data", "--part=1/2")
    assert not lacks(refused(forge_run, "--join"), "parts of 2 and 4", "data/parts")


def test_every_file_that_was_damaged_or_lost_is_named(
    forge_run: Callable[..., Any], done: None, prepare: Prepare
) -> None:
    flipped, lost, short = (
        Path("data/parts", name)
        for name in ("1-of-3/train-00000.bin", "2-of-3/train-00001.ends", "3-of-3/train-00000.bytes")
    )
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    lost.unlink()
    os.truncate(short, 8)
    err = refused(forge_run, "--join")
    assert not lacks(err, f"{flipped} is damaged", f"{lost} is missing", f"{short} has 8 bytes")
    assert not lacks(err, "remove data/parts/1-of-3", "--part 1/3")
    for number in (1, 2, 3):
        shutil.rmtree(f"data/parts/{number}-of-3")
        prepare(*ARGUMENTS, "--out=data", f"--part={number}/3")
    prepare(*ARGUMENTS, "--out=data", "--join")


def test_what_does_not_fit_to_the_parts_is_refused(forge_run: Callable[..., Any], done: None) -> None:
    err = refused(forge_run, "--shard-tokens=2k", "--join")
    assert not lacks(err, "data/parts/1-of-3", "data/parts/3-of-3", "shard_tokens: 150 then, 2000 now")
    err = refused(forge_run, "--held-out-every=5", "--part=2/3")
    assert not lacks(err, "data/parts/2-of-3", "held_out_every: 4 then, 5 now")
    assert not lacks(refused(forge_run), "data has parts", "--join")
    record = Path("data/parts/2-of-3/part.json")
    before = record.read_text()
    record.write_text(before.replace('"vocab_size": 28', '"vocab_size": 27'))
    assert not lacks(refused(forge_run, "--join"), "part 2/3", "another tokenizer", "remove data/parts/2-of-3")
    record.write_text(before)
    os.utime("a.jsonl")
    assert not lacks(refused(forge_run, "--join"), "data/parts/1-of-3", "input a.jsonl: has changed since")


@pytest.mark.parametrize("argument", ["--part=1/2", "--join"])
def test_a_tokenizer_that_is_trained_on_the_documents_must_exist(
    forge_run: Callable[..., Any], prepare: Prepare, argument: str
) -> None:
    trained = ("--tokenizer=bpe", "--tokenizer.vocab_size=270")
    if argument == "--join":
        prepare("a.jsonl", "--out=data", "--part=1/1", "--errors=skip")
    code, _, err = forge_run("data", "prepare", "a.jsonl", "--out=data", "--errors=skip", *trained, argument)
    assert code == 2
    if argument == "--part=1/2":
        assert not lacks(err, "trained on", "--tokenizer prepared", "--tokenizer.path=FOLDER")
        # Before anything is made
        assert not Path("data").exists()
    prepare("b.txt", "--out=trained", *trained)
    kept = ("--tokenizer=prepared", "--tokenizer.path=trained", "--errors=skip")
    prepare("a.jsonl", "--out=whole", *kept)
    shutil.rmtree("data", ignore_errors=True)
    for number in (1, 2):
        prepare("a.jsonl", "--out=data", *kept, f"--part={number}/2")
    prepare("a.jsonl", "--out=data", *kept, "--join")
    assert content() == content("whole")


def test_a_join_that_was_killed_is_continued_by_a_join_alone(
    forge_run: Callable[..., Any], prepare: Prepare, done: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(monkeypatch, prepare, 5, *ARGUMENTS, "--out=data", "--join")
    assert not lacks(refused(forge_run), "data", "with --join")
    # The whole script again: parts that are finished say so, and one that is lost cannot be made now
    assert "part 2/3 of data is finished" in prepare(*ARGUMENTS, "--out=data", "--part=2/3")
    assert not lacks(refused(forge_run, "--held-out-every=5", "--part=2/3"), "held_out_every: 4 then, 5 now")
    Path("data/parts/2-of-3").rename("elsewhere")
    assert not lacks(refused(forge_run, "--part=2/3"), "data", "at work")
    Path("elsewhere").rename("data/parts/2-of-3")
    assert "continuing after" in prepare(*ARGUMENTS, "--out=data", "--join")


@pytest.mark.parametrize("text", ["0/3", "4/3", "2", "a/b"])
def test_what_is_no_part_is_refused(forge_run: Callable[..., Any], text: str) -> None:
    assert not lacks(refused(forge_run, f"--part={text}"), "--part", repr(text), "1/8")


def test_a_part_is_no_data_to_train_on(done: None) -> None:
    with pytest.raises(JobError, match="--join"):
        read_prepared("data/parts/1-of-3")
