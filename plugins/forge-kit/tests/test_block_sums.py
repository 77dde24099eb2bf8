"""Damage to data at rest: found when a block is first read, wherever a bit has flipped."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.contracts.errors import DataError
from forge_kit.data.block_sums import BLOCK, CheckedBlocks, checked_map, sums_of, write_sums
from forge_kit.data.token_file import HEADER, TokenFile, TokenFileWriter
from forge_testing.refusals import naming


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of two and a half blocks."""
    path = tmp_path_factory.mktemp("sums") / "file"
    path.write_bytes(os.urandom(5 * BLOCK // 2))
    write_sums(path)
    return path


@given(place=st.integers(0, 5 * BLOCK // 2 - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found_in_its_block_and_in_no_other(intact: Path, place: int, bit: int) -> None:
    data = bytearray(intact.read_bytes())
    data[place] ^= 1 << bit
    damaged = intact.with_name("damaged")
    damaged.write_bytes(data)
    sums_of(damaged).write_bytes(sums_of(intact).read_bytes())
    blocks = checked_map(damaged, np.frombuffer(data, np.uint8))
    for number in range(3):
        if number != place // BLOCK:
            blocks.demand(number * BLOCK, number * BLOCK + 1)
    with pytest.raises(DataError, match=rf"damaged: bytes {place // BLOCK * BLOCK:,} to "):
        blocks.demand(place, place + 1)


@pytest.mark.parametrize(("size", "blocks"), [(2 * BLOCK, 2), (2 * BLOCK + 1, 3)])
def test_sums_of_another_number_of_blocks_are_damaged(tmp_path: Path, size: int, blocks: int) -> None:
    sums = sums_of(tmp_path / "file")
    data = np.zeros(size, np.uint8)
    for number in (blocks - 1, blocks + 1):
        sums.write_bytes(bytes(4 * number))
        with pytest.raises(DataError, match=naming(sums, f"{number} sums", f"{blocks} blocks")):
            checked_map(tmp_path / "file", data)
    sums.write_bytes(bytes(4 * blocks))
    assert len(checked_map(tmp_path / "file", data).checked) == blocks


def test_a_block_is_checked_once_and_a_damaged_one_each_time() -> None:
    asked = []
    blocks = CheckedBlocks(4 * BLOCK, lambda number: asked.append(number) or ("damaged" if number == 3 else ""))
    for _ in range(2):
        blocks.demand(BLOCK - 1, 2 * BLOCK + 1)
        with pytest.raises(DataError, match="damaged"):
            blocks.demand(3 * BLOCK, 3 * BLOCK + 1)
    assert asked == [0, 1, 2, 3, 3]


def test_blocks_are_complete_when_each_was_checked_and_none_is_damaged() -> None:
    damaged = {1}
    blocks = CheckedBlocks(4 * BLOCK, lambda number: "damaged" if number in damaged else "")
    for start in (3, 0, 2):
        blocks.demand(start * BLOCK, start * BLOCK + 1)
        assert not blocks.is_complete
    with pytest.raises(DataError, match="damaged"):
        blocks.demand(0, 4 * BLOCK)
    assert not blocks.is_complete
    damaged.clear()
    blocks.demand(BLOCK, BLOCK + 1)
    assert blocks.is_complete
    assert CheckedBlocks(0, lambda number: "damaged").is_complete


@given(
    pieces=st.lists(st.tuples(st.integers(0, 99_999), st.integers(1, 70_000)), max_size=8),
    place=st.integers(0, 99_999),
)
@settings(deadline=None)
def test_no_damaged_token_is_handed_out_in_whatever_order_they_are_read(
    corpus: Path, pieces: list[tuple[int, int]], place: int
) -> None:
    file = corpus.with_suffix(".bin")
    intact = file.read_bytes()
    expected = TokenFile(corpus).tokens(0, 100_000)
    with file.open("r+b") as handle:
        handle.seek(HEADER.size + 2 * place)
        handle.write(bytes([intact[HEADER.size + 2 * place] ^ 1]))
    try:
        damaged = TokenFile(corpus)
        for start, count in pieces:
            try:
                ids = damaged.tokens(start, start + count)
            except DataError:
                continue
            assert (ids == expected[start : start + count]).all()
        with pytest.raises(DataError, match=r"not those that were written"):
            damaged.tokens(place, place + 1)
    finally:
        file.write_bytes(intact)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token file of a bit more than three blocks, with sums."""
    stem = tmp_path_factory.mktemp("corpus") / "tokens"
    with TokenFileWriter(stem, 60_000, 0) as writer:
        writer.add("document", np.random.default_rng(0).integers(1, 60_000, 99_999))
    for path in list(stem.parent.iterdir()):
        write_sums(path)
    return stem


@pytest.mark.parametrize("suffix", [".bin", ".ends", ".learned"])
def test_damaged_documents_are_refused(tmp_path: Path, suffix: str) -> None:
    with TokenFileWriter(tmp_path / "chat", 100, 9, learned=True) as writer:
        writer.add("document", [1, 2, 3], learned=np.array([True, False, True]))
    for path in list(tmp_path.iterdir()):
        write_sums(path)
    TokenFile(tmp_path / "chat").verify()
    path = tmp_path / f"chat{suffix}"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        DataError, match=naming(f"chat{suffix}: bytes 0 to {len(data)}", "CRC-32", f"the folder {tmp_path}")
    ):
        TokenFile(tmp_path / "chat").verify()


def test_ids_beyond_the_vocabulary_of_a_file_without_sums_are_named(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "old", 100, 9) as writer:
        writer.add("document", [1, 2, 3])
    data = bytearray((tmp_path / "old.bin").read_bytes())
    data[-3] = 200
    (tmp_path / "old.bin").write_bytes(data)
    with pytest.raises(DataError, match=naming("old.bin", "token 2 is 51203", "100 ids")):
        TokenFile(tmp_path / "old").tokens(0, 1)
