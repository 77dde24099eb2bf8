"""Folders of the cache that take long to make are continued by the next process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forge_kit.data import cache
from forge_kit.data.cache import PROGRESS, Progress, cached_folder
from forge_kit.data.token_file import TokenFile, TokenFileWriter

END = 0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "SAVE_INTERVAL_S", 0.0)
    return tmp_path / "group"


class Interrupted:
    """Writes twenty documents, and is killed after some of them: as a process that dies leaves its folder."""

    def __init__(self, learned: bool = False) -> None:
        self.written: list[int] = []
        self.learned = learned
        self.dies_at = -1

    def __call__(self, folder: Path) -> dict[str, int]:
        progress = Progress(folder)
        first = progress.state.get("documents", 0)
        resume = progress.state.get("writer")
        with TokenFileWriter(folder / "tokens", 100, END, learned=self.learned, resume=resume) as writer:
            for number in range(first, 20):
                self.written.append(number)
                mask = np.arange(number + 1) % 2 == 0 if self.learned else None
                writer.add(f"document {number}", [1 + number] * (number + 1), text_bytes=number, learned=mask)
                if number == self.dies_at:
                    raise KeyboardInterrupt
                if number % 3 == 2:
                    progress.save({"documents": number + 1, "writer": writer.sync()})
        progress.finish()
        return {"documents": writer.header().documents}


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("dies_at", [2, 4, 19])
def test_tokens_are_written_on_where_a_process_died_and_come_out_the_same(folder, learned: bool, dies_at: int) -> None:
    whole = cached_folder("group", "whole", Interrupted(learned), resumable=True)
    make = Interrupted(learned)
    make.dies_at = dies_at
    with pytest.raises(KeyboardInterrupt):
        cached_folder("group", "cut", make, resumable=True)
    make.dies_at = -1
    made = cached_folder("group", "cut", make, resumable=True)
    assert made.digests == whole.digests
    assert made.info == whole.info == {"documents": 20}
    assert make.written[dies_at + 1] == dies_at // 3 * 3, "it begins after the last document that was synced"
    assert TokenFile(made.path / "tokens").header.documents == 20
    assert sorted(path.name for path in folder.iterdir()) == ["cut", "whole"]


def test_an_error_leaves_nothing_to_continue(folder) -> None:
    def fail(at: Path) -> dict[str, int]:
        Progress(at).save({"documents": 3})
        raise ValueError("the corpus is no good")

    with pytest.raises(ValueError, match="no good"):
        cached_folder("group", "key", fail, resumable=True)
    assert list(folder.iterdir()) == []


def test_what_can_be_continued_is_not_cleared_however_old_it_is(folder, monkeypatch) -> None:
    monkeypatch.setattr(cache, "ABANDONED_AFTER_S", -1.0)
    make = Interrupted()
    make.dies_at = 10
    with pytest.raises(KeyboardInterrupt):
        cached_folder("group", "key", make, resumable=True)
    [partial] = folder.iterdir()
    assert (partial / PROGRESS).exists()
    make.dies_at = -1
    cached_folder("group", "key", make, resumable=True)
    assert make.written.count(8) == 1


@pytest.mark.parametrize(("wanted", "names"), [({}, ["a"]), ({"sums": True}, ["a", "a.crc32"])])
def test_sums_of_blocks_are_written_if_they_are_asked_for(folder, wanted, names) -> None:
    def make(folder: Path) -> dict[str, int]:
        (folder / "a").write_bytes(bytes(9))
        return {}

    made = cached_folder("group", "key", make, **wanted).path
    assert sorted(path.name for path in made.iterdir() if path.name[0] == "a") == names


def test_the_identity_of_what_is_cached_is_that_of_its_content(folder) -> None:
    one, other = (cached_folder("group", key, Interrupted()) for key in ("one", "other"))
    assert one.identity("train") == other.identity("train") != one.identity("held_out")


def test_what_is_there_is_opened_without_the_lock(folder, monkeypatch) -> None:
    """So that a cache that only others may write can be read."""
    made = cached_folder("group", "key", Interrupted())
    monkeypatch.setattr(cache, "locked", None)
    assert cached_folder("group", "key", Interrupted()).path == made.path
