"""However often the command is stopped: the same command goes on, and the folder is that of one that never stopped."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from forge_plugin_memmap.prepare import documents, folder, inputs, parquet_files, run, text_files, writing
from forge_testing.processes import HANG_S
from forge_testing.refusals import lacks

Prepare = Callable[..., str]
INPUTS = ("a.jsonl", "b.txt", "c.jsonl.gz", "d.parquet")
ARGUMENTS = (*INPUTS, "--out=data", "--held-out-every=4", "--shard-tokens=150", "--errors=skip")
TOKENIZER = "--tokenizer=./letters.py:Letters"


@pytest.fixture(autouse=True)
def input_files(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of every format, in small chunks, and progress noted after each of them."""
    monkeypatch.setattr(inputs, "CHUNK", 60)
    for module in (text_files, parquet_files):
        monkeypatch.setattr(module, "BLOCK", 32)
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 16)
    monkeypatch.setattr(run, "SAVE_EVERY_S", 0)
    found = [f"document {number} " * (number % 7) for number in range(30)]
    Path("a.jsonl").write_text(
        "".join(json.dumps({"text": text, "id": f"d{n}"}) + "\n" for n, text in enumerate(found)) + "not JSON\n"
    )
    Path("b.txt").write_text("a long text, line by line\n" * 12)
    import gzip

    Path("c.jsonl.gz").write_bytes(gzip.compress(Path("a.jsonl").read_bytes()))
    parquet.write_table(pa.table({"text": pa.array([*found, None])}), "d.parquet", row_group_size=7)


def content(folder: str = "data") -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture
def uninterrupted(prepare: Prepare) -> dict[str, bytes]:
    """The folder of a command that was never stopped."""
    prepare(*ARGUMENTS)
    os.rename("data", "whole")
    return content("whole")


class Killed(BaseException):
    """Nothing but the process itself ends: no handler may tidy up."""


def kill_at(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, call: int, before: bool) -> None:
    """End the process at a call of a function, before or after it."""
    original, calls = getattr(module, name), iter(range(10**6))

    def end(*arguments: Any) -> Any:
        ends = next(calls) == call
        if ends and before:
            raise Killed
        result = original(*arguments)
        if ends:
            raise Killed
        return result

    monkeypatch.setattr(module, name, end)


POINTS = [
    (run, "save_state", [0, 1, 9]),
    (writing, "file_digest", [0, 3]),
    (writing.SplitWriter, "_append", [1, 9]),
    (folder, "_replace", [2]),
    (run, "finish", [0]),
]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(("module", "name", "call"), [(m, n, c) for m, n, calls in POINTS for c in calls])
def test_wherever_it_is_killed_it_goes_on_to_the_same_bytes(
    prepare: Prepare, uninterrupted: dict[str, bytes], module: Any, name: str, call: int, before: bool
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, module, name, call, before)
        with pytest.raises(Killed):
            prepare(*ARGUMENTS)
    prepare(*ARGUMENTS)
    assert content() == uninterrupted


def test_what_a_kill_leaves_of_a_file_that_was_being_written_is_cleared(
    prepare: Prepare, uninterrupted: dict[str, bytes]
) -> None:
    def leave(name: str) -> None:
        Path("data", f".{name}.0123456789ab").write_text("{")

    Path("data").mkdir()
    leave("inputs.json")  # by a first start, before it had anything else
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, run, "save_state", 9, before=False)
        with pytest.raises(Killed):
            prepare(*ARGUMENTS)
    leave("unfinished.json")
    leave("manifest.json")
    prepare(*ARGUMENTS)
    assert content() == uninterrupted


def test_it_goes_on_after_what_was_noted(prepare: Prepare, uninterrupted: dict[str, bytes]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, run, "save_state", 20, before=False)
        with pytest.raises(Killed):
            prepare(*ARGUMENTS)
    state = json.loads(Path("data/unfinished.json").read_text())
    tokens = sum(split[part]["tokens"] for split in state["splits"].values() for part in ("total", "open"))
    assert tokens > 500
    assert f"continuing after {tokens:,} tokens\n" in prepare(*ARGUMENTS)


@pytest.mark.parametrize("end", [14, 28, None])
@pytest.mark.parametrize("start", [0, 6, 7, 10, 13])
def test_rows_between_two_places_are_read_also_from_within_a_row_group(start: int, end: int | None) -> None:
    whole = parquet.read_table("d.parquet")["text"].to_pylist()
    stop = {} if end is None else {"row": end}
    found = list[str | None]()
    for read in parquet_files.read_rows("d.parquet", documents.Fields(), {"row": start}, stop):
        assert read.at == {"row": start + len(found)}
        found += [None if value is None else value.decode() for value in read.item.values]
    assert found == whole[start:end]


def test_killed_again_and_again_it_still_ends_with_the_same_bytes(
    prepare: Prepare, uninterrupted: dict[str, bytes]
) -> None:
    for _ in range(50):
        with pytest.MonkeyPatch.context() as patched:
            kill_at(patched, run, "save_state", 5, before=False)
            try:
                prepare(*ARGUMENTS)
                break
            except Killed:
                continue
    assert content() == uninterrupted


SLOW = """
import signal
import sys
from forge_core.cli import main
from forge_plugin_memmap.prepare import inputs, run
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that a shell runs in the background ignores it
inputs.CHUNK, run.SAVE_EVERY_S = 60, 0.05
sys.exit(main(sys.argv[1:]))
"""


def start(*arguments: str, seconds: float = 0.03) -> subprocess.Popen[bytes]:
    """The command in a process of its own, which takes so long for each document."""
    command = [sys.executable, "-c", SLOW, "data", "prepare", *ARGUMENTS, TOKENIZER, f"--tokenizer.seconds={seconds}"]
    command += arguments
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def saved_tokens() -> int:
    try:
        state = json.loads(Path("data/unfinished.json").read_text())
    except FileNotFoundError:
        return 0
    return sum(split[part]["tokens"] for split in state["splits"].values() for part in ("total", "open"))


def wait_for_more_than(tokens: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(12_000):
        if saved_tokens() > tokens or process.poll() is not None:
            return
        time.sleep(0.05)
    raise AssertionError("it makes no progress")


def children(process: subprocess.Popen[bytes]) -> Iterator[int]:
    yield from map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at processes in /proc")
def test_after_sigkill_it_goes_on_and_no_worker_stays_behind(prepare: Prepare) -> None:
    prepare(*ARGUMENTS, "--tokenizer.seconds=0.03")
    os.rename("data", "whole")
    for workers in (2, 1):
        process = start(f"--workers={workers}")
        wait_for_more_than(saved_tokens(), process)
        left = list(children(process))
        process.kill()
        process.communicate()
        deadline = time.monotonic() + HANG_S
        while any(Path(f"/proc/{child}").exists() for child in left):
            assert time.monotonic() < deadline, "a worker outlived the command"
            time.sleep(0.05)
    assert Path("data/unfinished.json").exists()
    assert start("--workers=3").wait() == 0
    assert content() == content("whole")


def test_an_interrupt_ends_it_with_the_way_to_go_on(here: Path) -> None:
    process = start("--workers=2", seconds=0.3)
    wait_for_more_than(0, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, err.decode()
    assert b"Traceback" not in err


def test_a_worker_that_is_killed_ends_it_with_the_way_to_go_on(here: Path) -> None:
    process = start("--workers=2", seconds=0.3)
    wait_for_more_than(0, process)
    for child in children(process):
        os.kill(child, signal.SIGKILL)
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert b"a worker process ended unexpectedly; run the same command again to continue" in err


# --- other arguments ---------------------------------------------------------------------------------------------


@pytest.fixture
def begun(prepare: Prepare) -> None:
    """An unfinished folder."""
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, run, "save_state", 9, before=False)
        with pytest.raises(Killed):
            prepare(*ARGUMENTS)


def refused(forge_run: Callable[..., Any], *arguments: str) -> str:
    before = content()
    code, _, err = forge_run("data", "prepare", *arguments, TOKENIZER, "--workers=1")
    assert code == 2
    assert content() == before
    return err


@pytest.mark.parametrize("state", ["begun", "finished"])
def test_with_other_arguments_it_refuses_and_says_which(
    forge_run: Callable[..., Any], prepare: Prepare, begun: None, state: str
) -> None:
    if state == "finished":
        prepare(*ARGUMENTS)
    first, *rows = refused(forge_run, *ARGUMENTS, "--held-out-every=5", "--shard-tokens=2k").splitlines()
    assert not lacks(first, "data", "--out")
    assert len(rows) == 2
    assert not lacks(rows[0], "shard_tokens", 150, 2000)
    assert not lacks(rows[1], "held_out_every", 4, 5)


def test_with_other_inputs_it_refuses_and_says_which(forge_run: Callable[..., Any], begun: None) -> None:
    Path("a.jsonl").write_text('{"text": "changed"}\n')
    Path("e.txt").write_text("new")
    arguments = [argument for argument in ARGUMENTS if argument != "b.txt"]
    rows = refused(forge_run, "e.txt", *arguments).splitlines()[1:]
    assert [row.strip().partition(":")[0] for row in rows] == ["input b.txt", "input e.txt", "input a.jsonl"]


def test_with_inputs_in_another_order_it_refuses(forge_run: Callable[..., Any], begun: None) -> None:
    err = refused(forge_run, *reversed(INPUTS), *ARGUMENTS[len(INPUTS) :])
    assert not lacks(err, "order")


def test_another_tokenizer_in_its_folder_is_refused(forge_run: Callable[..., Any], begun: None) -> None:
    Path("data/tokenizer/component.json").write_text('{"type": "bytes"}')
    assert not lacks(refused(forge_run, *ARGUMENTS), "data/tokenizer", "changed", "remove data")


def test_after_a_strict_stop_it_goes_on_if_told_to_skip(
    forge_run: Callable[..., Any], prepare: Prepare, uninterrupted: dict[str, bytes]
) -> None:
    strict = [argument for argument in ARGUMENTS if argument != "--errors=skip"]
    code, _, err = forge_run("data", "prepare", *strict, TOKENIZER, "--workers=1")
    assert code == 2
    assert "a.jsonl:31: not JSON" in err
    assert saved_tokens() > 0
    assert "continuing after" in prepare(*ARGUMENTS)
    assert content() == uninterrupted


def test_a_folder_without_a_single_token_yet_may_begin_otherwise(prepare: Prepare) -> None:
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, run, "_encode", 0, before=True)
        with pytest.raises(Killed):
            prepare(*ARGUMENTS)
    prepare("b.txt", "--out=data")
    assert json.loads(Path("data/manifest.json").read_text())["splits"]["train"]["documents"] == 1


def test_a_folder_of_something_else_is_left_alone(forge_run: Callable[..., Any]) -> None:
    Path("data").mkdir()
    Path("data/thesis.txt").write_text("years of work")
    assert not lacks(refused(forge_run, *ARGUMENTS), "--out data")
    Path("data/inputs.json").write_text("{}")  # as data prepare begins a folder
    assert not lacks(refused(forge_run, *ARGUMENTS), "'thesis.txt'", "--out")
    assert Path("data/thesis.txt").read_text() == "years of work"


def test_what_was_finished_strictly_is_what_skip_would_have_made(prepare: Prepare) -> None:
    prepare("b.txt", "--out=data")
    written = content()
    prepare("b.txt", "--out=data", "--errors=skip")
    assert content() == written


def test_a_finished_folder_is_not_made_again(
    prepare: Prepare, uninterrupted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.move("whole", "data")
    monkeypatch.setattr(run, "_encode", lambda *_: pytest.fail("it was made again"))
    prepare(*ARGUMENTS)
    assert content() == uninterrupted


def test_two_commands_do_not_write_to_one_folder(forge_run: Callable[..., Any], here: Path) -> None:
    process = start("--workers=1")
    wait_for_more_than(0, process)
    code, _, err = forge_run("data", "prepare", *ARGUMENTS, TOKENIZER, "--workers=1")
    process.kill()
    process.communicate()
    assert code == 1
    assert not lacks(err, "data", "--out", "another data prepare")


# --- the disk ----------------------------------------------------------------------------------------------------


def test_a_full_disk_is_told_and_it_goes_on_when_there_is_room(
    forge_run: Callable[..., Any], prepare: Prepare, uninterrupted: dict[str, bytes]
) -> None:
    """A limit on the size of files stands in for the disk's."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    arguments = [argument for argument in ARGUMENTS if not argument.startswith("--shard-tokens")]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        code, _, err = forge_run("data", "prepare", *arguments, TOKENIZER, "--workers=1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1
    assert not lacks(err, "data: File too large")  # the system's words
    prepare(*arguments)
    assert json.loads(Path("data/manifest.json").read_text())["splits"] != {}


def test_a_folder_that_cannot_be_written_is_told(
    forge_run: Callable[..., Any], begun: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, data: bytes) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr("forge_plugin_memmap.prepare.folder.write_atomically", read_only)
    code, _, err = forge_run("data", "prepare", *ARGUMENTS, TOKENIZER, "--workers=1")
    assert code == 1
    assert not lacks(err, "data/unfinished.json: Read-only file system")


def test_an_input_that_changes_while_it_is_read_is_told(forge_run: Callable[..., Any]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        original = run._encode
        patched.setattr(run, "_encode", lambda *given: (original(*given), Path("b.txt").write_text("changed")))
        code, _, err = forge_run("data", "prepare", *ARGUMENTS, TOKENIZER, "--workers=1")
    assert code == 2
    assert not lacks(err, "b.txt", "--out")
    assert not Path("data/manifest.json").exists()


def test_no_space_left_is_told_the_same_way(forge_run: Callable[..., Any], prepare: Prepare) -> None:
    with pytest.MonkeyPatch.context() as patched:
        original, calls = writing.SplitWriter._append, iter(range(10**6))

        def append(self: Any, block: Any) -> None:
            if next(calls) == 9:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            original(self, block)

        patched.setattr(writing.SplitWriter, "_append", append)
        code, _, err = forge_run("data", "prepare", *ARGUMENTS, TOKENIZER, "--workers=1")
    assert code == 1
    assert not lacks(err, "data: No space left on device")
    assert "continuing after" in prepare(*ARGUMENTS)


def test_what_was_written_and_is_gone_is_told(forge_run: Callable[..., Any], begun: None) -> None:
    shard = max(Path("data").glob("train-*.bin"))
    os.truncate(shard, 64)
    code, _, err = forge_run("data", "prepare", *ARGUMENTS, TOKENIZER, "--workers=1")
    assert code == 1
    assert not lacks(err, shard, "64 bytes")
