"""Token files are made once, never served stale, and damage to them is found."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_core.contracts.errors import DataError, ForgeError
from forge_kit.data import cache
from forge_plugin_text import Text, TextFile, corpus
from forge_plugin_text import tokens as token_files
from forge_plugin_text.bytes import ByteTokenizer
from forge_plugin_text.reading import Reading
from forge_plugin_text.split import Split
from forge_testing.processes import HANG_S
from forge_testing.refusals import lacks, naming, refuses


class CountingTokenizer(ByteTokenizer):
    """Counts the texts that it encodes."""

    def __init__(self, fingerprint: str = "counting") -> None:
        self.encoded, self._fingerprint = 0, fingerprint

    def encode(self, text: str) -> list[int]:
        self.encoded += 1
        return super().encode(text)

    def fingerprint(self) -> str:
        return self._fingerprint


@pytest.fixture
def build(here: Path, make_context):
    """Builds the dataset of `*.txt` again, as another process would: keys -> (dataset, texts encoded for it)."""
    (here / "a.txt").write_text("first document")
    (here / "b.txt").write_text("second document")

    def run(tokenizer: CountingTokenizer | None = None, **keys):
        tokenizer = tokenizer or CountingTokenizer()
        return Text(path="*.txt", **keys).build(make_context(tokenizer)), tokenizer.encoded

    return run


@pytest.fixture
def index_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust time stamps however fresh they are, as after the first seconds of a file's life."""
    monkeypatch.setattr(corpus, "SETTLED_AFTER_NS", -(10**10))


def token_folder(cache: Path) -> Path:
    [folder] = (cache / "tokens").iterdir()
    return folder


def content(documents) -> list[int]:
    return documents.tokens(0, len(documents)).tolist()


# --- hits and misses -------------------------------------------------------------------------------------------------


def test_the_second_start_encodes_nothing_and_gives_the_same(build) -> None:
    (first, encoded), (second, encoded_again) = build(), build()
    assert (encoded, encoded_again) == (2, 0)
    assert content(first) == content(second)


def test_the_second_start_reads_no_file_that_has_not_changed(
    build, index_at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    build()
    monkeypatch.setattr(corpus, "file_digest", lambda path: pytest.fail(f"{path} was read"))
    assert build()[1] == 0


def test_a_new_file_is_read_without_reading_the_others_again(
    build, here: Path, index_at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    build()
    (here / "c.txt").write_text("third")
    read: list[str] = []
    monkeypatch.setattr(corpus, "file_digest", lambda path: read.append(Path(path).name) or "digest")
    build()
    assert set(read) == {"c.txt"}


def test_fresh_files_are_read_again_because_their_time_stamps_prove_nothing(
    build, monkeypatch: pytest.MonkeyPatch
) -> None:
    build()
    read: list[str] = []
    original = corpus.file_digest
    monkeypatch.setattr(corpus, "file_digest", lambda path: read.append(Path(path).name) or original(path))
    assert build()[1] == 0
    assert read == ["a.txt", "b.txt"]


def test_a_file_edited_to_the_same_size_and_time_is_noticed(build, here: Path, index_at_once: None) -> None:
    build()
    before = (here / "a.txt").stat()
    time.sleep(0.02)  # beyond the resolution of the change time
    (here / "a.txt").write_text("FIRST DOCUMENT")
    os.utime(here / "a.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
    dataset, encoded = build()
    assert encoded == 2
    assert bytes(content(dataset)[:5]) == b"FIRST"


def test_a_file_touched_but_not_changed_costs_no_encoding(build, here: Path, index_at_once: None) -> None:
    build()
    os.utime(here / "a.txt", (1, 1))
    assert build()[1] == 0


@pytest.mark.parametrize("keys", [{"held_out_every": 2}, {"errors": "replace"}])
def test_other_settings_have_their_own_token_files(build, keys) -> None:
    build()
    assert build(**keys)[1] == 2
    assert build()[1] == build(**keys)[1] == 0


def test_another_tokenizer_has_its_own_token_files(build) -> None:
    build()
    assert build(CountingTokenizer("another"))[1] == 2


def test_an_index_that_cannot_be_read_is_made_again(build, cache: Path) -> None:
    build()
    [index] = (cache / "files").iterdir()
    index.write_text("{")
    assert build()[1] == 0


# --- damage ----------------------------------------------------------------------------------------------------------


def truncate(folder: Path) -> None:
    os.truncate(folder / "train.bin", 10)


def remove(folder: Path) -> None:
    (folder / "train.bin").unlink()


def spoil_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def change_format(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 0}))


def flip(folder: Path) -> None:
    data = bytearray((folder / "train.bin").read_bytes())
    data[-2] ^= 1
    (folder / "train.bin").write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "facts"),
    [
        (truncate, ["train.bin", "10 bytes", 126]),
        (remove, ["train.bin: No such file or directory"]),
        (spoil_manifest, ["manifest.json", "read"]),
        (change_format, ["manifest.json", "another folder"]),
    ],
)
def test_damage_is_found_and_made_good_with_a_warning(
    build, cache: Path, caplog: pytest.LogCaptureFixture, damage, facts: list[object]
) -> None:
    intact = content(build()[0])
    damage(token_folder(cache))
    dataset, encoded = build()
    assert encoded == 2
    assert content(dataset) == intact
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert not lacks(warning, token_folder(cache), *facts)
    assert build()[1] == 0


def test_flipped_bytes_are_found_where_the_job_asks_for_full_verification(build, cache: Path) -> None:
    intact = content(build()[0])
    flip(token_folder(cache))
    with pytest.raises(DataError, match=naming("train.bin: bytes 0 to 126", "CRC-32")):
        content(build(verify="sizes")[0])
    dataset, encoded = build(verify="full")
    assert encoded == 2
    assert content(dataset) == intact
    assert build(verify="full")[1] == 0


def test_the_manifest_holds_sizes_digests_and_counts(build, cache: Path) -> None:
    build(held_out_every=2)
    folder = token_folder(cache)
    manifest = json.loads((folder / "manifest.json").read_text())
    names = {"train.bin", "train.ends", "held_out.bin", "held_out.ends"}
    assert set(manifest["files"]) == names | {f"{name}.crc32" for name in names}
    for name, described in manifest["files"].items():
        path = folder / name
        assert described == {"size": path.stat().st_size, "sha256": _sha256sum(path)}
    assert manifest["info"] == {
        "train": {"documents": 1, "tokens": 16, "bytes": 15},
        "held_out": {"documents": 1, "tokens": 15, "bytes": 14},
    }


def _sha256sum(path: Path) -> str:
    return subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]


# --- interruption and concurrency ------------------------------------------------------------------------------------


def test_an_interrupted_build_leaves_nothing_behind(build, cache: Path) -> None:
    class Interrupted(CountingTokenizer):
        def encode(self, text: str) -> list[int]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(Interrupted())
    assert list((cache / "tokens").iterdir()) == []
    assert build()[1] == 2


def test_a_corpus_that_changes_while_it_is_tokenised_is_an_error_and_not_cached(build, here: Path, cache: Path) -> None:
    class Meddling(CountingTokenizer):
        def encode(self, text: str) -> list[int]:
            (here / "b.txt").write_text("changed meanwhile")
            return super().encode(text)

    with refuses("", "'a.txt'", "1 more"):
        build(Meddling())
    assert list((cache / "tokens").iterdir()) == []


@pytest.mark.parametrize("text", ["longer than it was", "SAME DOCUMENT"])
def test_a_file_that_changes_while_its_digest_is_made_is_an_error(
    here: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """A digest of the old half and the new half would be that of no file."""
    path = here / "file.txt"
    path.write_text("same document")
    os.utime(path, (1, 1))
    digest = corpus.file_digest
    monkeypatch.setattr(corpus, "file_digest", lambda name: path.write_text(text) and digest(name))
    with refuses("", path, "changed"):
        Text(path=str(path)).corpus().fingerprint()


def test_a_file_that_can_be_listed_and_not_read_is_an_error(here: Path) -> None:
    """A folder stands in for a file that belongs to another user."""
    with refuses("", here, "Is a directory"):
        corpus.TextCorpus((TextFile("notes.txt", str(here)),), Reading(), Split()).fingerprint()


def test_what_died_long_ago_is_cleared_and_what_is_being_made_stays(build, cache: Path) -> None:
    build()
    folder = token_folder(cache)
    dead, alive = (folder.with_name(f".{folder.name}.{name}") for name in ("dead", "alive"))
    for leftover in (dead, alive):
        leftover.mkdir()
        (leftover / "train.bin").touch()
    for path in (dead / "train.bin", dead):
        os.utime(path, (1, 1))
    truncate(folder)
    build()
    assert not dead.exists()
    assert alive.exists()


def test_the_first_of_two_makers_without_locks_wins(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    from forge_kit.data.cache import cached_folder

    def make(name: str, folder: Path) -> dict[str, str]:
        (folder / "content").write_text(name)
        return {"by": name}

    def make_while_another_does(folder: Path) -> dict[str, str]:
        cached_folder("group", "key", lambda other: make("first", other))
        return make("second", folder)

    stored = cached_folder("group", "key", make_while_another_does)
    assert stored.info == {"by": "first"}
    assert (stored.path / "content").read_text() == "first"
    assert [path.name for path in (cache / "group").iterdir()] == ["key"]
    assert not lacks(caplog.text, "locks")


SLOW_BUILD = """
import sys, time
from types import SimpleNamespace as Namespace
from forge_plugin_text import Text
from forge_plugin_text.bytes import ByteTokenizer

class Slow(ByteTokenizer):
    def encode_batch(self, texts):
        with open("encoded", "a") as log:
            log.write("once\\n")
        time.sleep(0.5)
        return super().encode_batch(texts)

job = Namespace(train=Namespace(seq_len=4))
data = Text(path="*.txt").build(Namespace(job=job, tokenizer=Slow(), mesh=None))
print(data.tokens(0, len(data)).tolist())
"""


def test_of_several_processes_that_start_at_once_one_builds_and_all_get_the_same(here: Path) -> None:
    (here / "a.txt").write_text("one document for all")
    processes = [
        subprocess.Popen([sys.executable, "-c", SLOW_BUILD], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    outputs = {process.communicate(timeout=HANG_S)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(outputs) == 1
    assert (here / "encoded").read_text() == "once\n"


# --- where the cache lies --------------------------------------------------------------------------------------------


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("FORGE_CACHE", "/forge")
    assert cache.cache_root() == Path("/forge")
    monkeypatch.delenv("FORGE_CACHE")
    assert cache.cache_root() == Path("/xdg/forge")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_root() == Path("/home/someone/.cache/forge")


def test_a_cache_that_cannot_be_written_is_an_error_with_the_way_out(
    build, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "file").touch()
    monkeypatch.setenv("FORGE_CACHE", str(here / "file"))
    with pytest.raises(ForgeError, match=naming(f"{here}/file/locks", "Not a directory", "FORGE_CACHE")):
        build()


# --- the beginning of text -------------------------------------------------------------------------------------------


class BeginningTokenizer(CountingTokenizer):
    """Asks for the ids 1 and 2 before every document."""

    begin_of_text = (1, 2)


def test_every_document_begins_as_the_tokenizer_asks(build) -> None:
    end = ByteTokenizer.end_of_text
    documents, _ = build(BeginningTokenizer(), held_out_every=2)
    assert content(documents) == [1, 2, *b"second document", end]
    assert content(documents.held_out) == [1, 2, *b"first document", end]


def test_a_document_in_parts_begins_once(build, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "PART_CHARACTERS", 4)
    documents, encoded = build(BeginningTokenizer())
    assert encoded > 6
    assert content(documents).count(1) == content(documents).count(2) == 2


def test_tokens_that_were_cached_without_a_beginning_are_not_taken(build) -> None:
    # With the same fingerprint, which a tokenizer may have forgotten to change.
    order = CountingTokenizer, BeginningTokenizer, CountingTokenizer
    plain, begun, again = (build(tokenizer())[0] for tokenizer in order)
    assert len(begun) == len(plain) + 4
    assert content(again) == content(plain)
