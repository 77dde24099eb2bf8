"""Files that other libraries wrote (`foreign/write.py`): what Forge reads from them is what these libraries read."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forge_core.contracts.errors import DataError, JobError, Problem
from forge_plugin_memmap import Memmap, index, shards
from forge_plugin_memmap.documents import ShardedDocuments
from forge_plugin_memmap.formats import Mds, mds
from forge_plugin_memmap.formats.reading import read_shard
from forge_plugin_memmap.unpacking import unpacked
from forge_testing.refusals import at, check_problems, lacks, refuses

Find = Callable[..., list[Problem]]
FILES = Path(__file__).parent / "foreign"
EXPECTED: dict[str, Any] = json.loads((FILES / "expected.json").read_text())


@pytest.fixture
def copied(here: Path) -> Path:
    """A copy of all files, to be damaged."""
    shutil.copytree(FILES, here / "foreign")
    return here / "foreign"


def opened(path: Path, limit: int | None = None) -> ShardedDocuments:
    """The documents of one file."""
    # Plain bytes, whose type no file states
    format = Mds(dtype="int64") if path.parent.name == "bytes" else None
    return ShardedDocuments(unpacked([read_shard(str(path), format)]), 0, limit=limit)


def contents(path: Path) -> tuple[list[int], list[int], list[int] | None]:
    """Ids, ends and mask as Forge reads them."""
    documents = opened(path)
    learned = documents.learned(0, len(documents))
    return documents.tokens(0, len(documents)).tolist(), documents.ends().tolist(), _listed(learned)


def _listed(learned: np.ndarray | None) -> list[int] | None:
    return None if learned is None else [int(bit) for bit in learned]


@pytest.mark.parametrize("block", [3, 1 << 22])
@pytest.mark.parametrize("name", EXPECTED)
def test_ids_ends_and_masks_are_those_of_the_library_that_wrote_them(
    name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, constant in ((index, "BLOCK"), (shards, "BLOCK"), (mds, "SAMPLES")):
        monkeypatch.setattr(module, constant, block)
    expected = EXPECTED[name]
    assert contents(FILES / name) == (expected["ids"], expected["ends"], expected["learned"])
    documents = pickle.loads(pickle.dumps(opened(FILES / name)))
    random = np.random.default_rng(0)
    for start, stop in np.sort(random.integers(0, len(documents) + 1, (30, 2))):
        assert documents.tokens(start, stop).tolist() == expected["ids"][start:stop]
        if expected["learned"]:
            assert _listed(documents.learned(start, stop)) == expected["learned"][start:stop]


# --- damage ------------------------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def _put(place: int, data: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[place : place + len(data)] = data
        path.write_bytes(content)

    return change


def _exchange(other: str) -> Callable[[Path], None]:
    return lambda path: shutil.copy(path.parent / other, path) and None


def _replace(old: str, new: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(path.read_text().replace(old, new)) and None


MEGATRON, LLM_C = "megatron/wide_text_document", "llm_c/gpt2_train_000001.bin"
DAMAGE = [
    ("datatrove/masked.ds", _cut, ("masked.ds.index", "381", "754 bytes", "cut short")),
    ("datatrove/masked.ds.index", _exchange("wide.ds.index"), ("masked.ds.index", "762 bytes", "other data")),
    ("datatrove/masked.ds.index", Path.unlink, ("masked.ds", "masked.ds.index is not beside it")),
    ("datatrove/masked.ds.loss", _cut, ("masked.ds.loss", "373 bytes", "381 tokens")),
    ("datatrove/masked.ds.metadata", _exchange("wide.ds.metadata"), ("masked.ds.metadata", "4 bytes", "381")),
    ("datatrove/masked.ds", Path.unlink, ("masked.ds.index", "masked.ds, is missing")),
    ("dolma/part-0-00000.npy", _cut, ("part-0-00000.csv.gz", "650 bytes", "329")),
    ("dolma/part-0-00000.csv.gz", _exchange("part-1-00000.csv.gz"), ("part-0-00000.csv.gz", "658 bytes", "332")),
    ("dolma/part-0-00000.csv.gz", _cut, ("part-0-00000.csv.gz", "table of documents")),
    ("dolma/part-0-00000.csv.gz", Path.unlink, ("part-0-00000.npy", "part-0-00000.csv.gz is not beside it", "raw")),
    ("dolma/part-0-00000.npy", Path.unlink, ("part-0-00000.csv.gz", "part-0-00000.npy, is missing")),
    (f"{MEGATRON}.bin", _cut, (f"{MEGATRON}.idx", "1824 bytes", "1816")),
    (f"{MEGATRON}.idx", _cut, (f"{MEGATRON}.idx", "434 bytes", "442")),
    (f"{MEGATRON}.idx", _exchange("text_sentence.idx"), (f"{MEGATRON}.idx", "766 bytes", "1824", "other data")),
    (f"{MEGATRON}.idx", _put(17, b"\x07"), (f"{MEGATRON}.idx", "float32", "integers")),
    (f"{MEGATRON}.idx", _put(9, b"\x02"), (f"{MEGATRON}.idx", "version 2")),
    (f"{MEGATRON}.bin", Path.unlink, (f"{MEGATRON}.idx", "wide_text_document.bin, is missing")),
    (LLM_C, _cut, (LLM_C, "1928 bytes", "1936", "456 tokens")),
    (LLM_C, _put(4, b"\x02"), (LLM_C, "version 2")),
    ("litdata/tensor/chunk-0-1.bin", _cut, ("chunk-0-1.bin", "588 bytes", "596", "6 items")),
    ("litdata/tensor/chunk-0-1.bin", Path.unlink, ("index.json", "chunk-0-1.bin", "missing")),
    ("litdata/tensor/index.json", Path.unlink, ("chunk-0-0.bin", "no known format", "raw")),
    ("litdata/tensor/index.json", _exchange("../numpy/index.json"), ("chunk-0-0.bin", "584 bytes", "666")),
    ("litdata/tensor/index.json", _replace("TokensLoader", "ParquetLoader"), ("ParquetLoader", "plain ids")),
    ("litdata/tensor/index.json", _replace(':16"', ':1"'), ("index.json", "dtype 1", "integers")),
    ("mds/array/shard.00001.mds", _cut, ("shard.00001.mds", "1359 bytes", "1367")),
    ("mds/array/shard.00001.mds", Path.unlink, ("index.json", "shard.00001.mds", "missing")),
    ("mds/array/index.json", Path.unlink, ("shard.00000.mds", "index.json", "does not list it")),
    ("mds/array/index.json", _exchange("../fixed/index.json"), ("shard.00000.mds", "1435 bytes", "1490")),
    ("mds/array/index.json", _replace("tokens", "ids"), ("index.json", "'tokens'", "ids", "column")),
    ("mds/array/index.json", _replace("ndarray:int32", "ndarray:float32"), ("index.json", "float32", "integers")),
    ("mds/bytes/index.json", lambda path: None, ("index.json", "plain bytes", 'dtype = "int64"')),
    ("mds/open/index.json", _replace('"zstd"', '"br"'), ("shard.00000.mds.zstd", "'br'", "zstd")),
    ("mds/open/shard.00000.mds.zstd", lambda path: path.with_suffix("").write_bytes(bytes(1464)), ("there twice",)),
]


@pytest.mark.parametrize(("name", "damage", "facts"), DAMAGE)
def test_damage_is_named_by_the_check(
    copied: Path, problems: Find, name: str, damage: Callable[[Path], None], facts: tuple[str, ...]
) -> None:
    damage(copied / name)
    found = problems(path=str((copied / name).parent), end_of_text=0)
    # Each shard of a folder has the problem of its index
    check_problems(found[:1], at("path", *facts))
    assert len(found) == 1 or name.startswith(("litdata", "mds"))


def test_sequences_of_megatron_that_do_not_lie_in_a_row_are_refused(copied: Path) -> None:
    """The fifth pointer, to the first sequence: Megatron would read that one twice."""
    _put(34 + 4 * 20 + 8 * 4, bytes(8))(copied / f"{MEGATRON}.idx")
    with refuses("", f"{MEGATRON}.idx", "one after the other"):
        contents(copied / f"{MEGATRON}.bin")


def test_a_file_that_two_formats_recognise_is_refused(copied: Path, problems: Find) -> None:
    path = copied / LLM_C
    shutil.copy(copied / f"{MEGATRON}.idx", path.with_suffix(".idx"))
    check_problems(problems(path=str(path), end_of_text=0), at("path", LLM_C, "llm_c", "megatron"))


def test_a_job_with_a_damaged_file_ends_with_exit_code_2(copied: Path, forge_run: Callable[..., Any]) -> None:
    Path("job.toml").write_text(
        '[job]\nname = "a"\n[train]\nsteps = 1\nseq_len = 8\nglobal_batch_size = 1\n[model]\ntype = "transformer"\n'
        'dim = 8\nlayers = 1\nvocab_size = 150000\nattention = { heads = 1 }\n[optimizer]\ntype = "adamw"\nlr = 1\n'
        '[[data.sources]]\ntype = "memmap"\npath = "foreign/megatron"\nend_of_text = 0\n'
    )
    assert forge_run("check", "job.toml")[0] == 0
    _cut(copied / f"{MEGATRON}.bin")
    code, _, message = forge_run("check", "job.toml")
    assert code == 2
    assert f"{MEGATRON}.bin" in message
    # The earlier spelling is answered with the new one
    assert '{type = "raw"}' in forge_run("check", "job.toml", "--data.sources.0.format=raw")[2]


# --- flipped bytes -----------------------------------------------------------------------------------------------

HEADERS = [
    ("datatrove/masked.ds", ".index", None),
    ("datatrove/masked.ds", ".metadata", None),
    ("datatrove/plain.ds", ".index", None),
    ("dolma/part-0-00000.npy", "csv.gz", None),
    ("dolma/part-1-00000.npy", "csv.gz", None),
    (f"{MEGATRON}.bin", "idx", None),
    ("megatron/text_sentence.bin", "idx", None),
    (LLM_C, "", 1024),
    ("llm_c/llama3_train_000001.bin", "", 12),
    ("litdata/numpy/chunk-0-0.bin", "index.json", None),
    ("litdata/tensor/chunk-0-1.bin", "index.json", None),
    ("litdata/tensor/chunk-0-1.bin", "", 32),
    ("mds/array/shard.00000.mds", "index.json", None),
    ("mds/fixed/shard.00001.mds", "", 200),
    ("mds/open/shard.00000.mds.zstd", "index.json", None),
    ("mds/open/shard.00001.mds.zstd", "", 7),
]
"""Data, the suffix of the file that describes it (with a dot: behind its own), and how much of that is a header.

Of a compressed shard, the header of its frame: what follows is data, of which streaming writes no sum by default."""


def _only_a_boundary(name: str, place: int, found: list[int], expected: list[int]) -> bool:
    """Whether a flip moved the end of a document, which three formats cannot notice: their tables are numbers alone.

    Ids and masks are the same; one end has moved, or is gone where it met a neighbour. In datatrove's index all entries
    but the last are such ends; in Megatron's, entries of the last table but the first and the last; in a chunk of
    litdata, places of items but the first and the last.
    """
    table = {"datatrove": 0, "litdata": 8, "megatron": 34 + 12 * (60 if "sentence" in name else 20)}[
        name.partition("/")[0]
    ]
    return place >= table and found[-1] == expected[-1] and len(set(found) ^ set(expected)) <= 2


def test_a_thousand_flipped_bytes_of_headers_and_indexes_are_errors_or_change_nothing(copied: Path) -> None:
    random = np.random.default_rng(0)
    caught = boundaries = 0
    for number in range(1000):
        name, suffix, length = HEADERS[number % len(HEADERS)]
        path = copied / name
        if suffix == "index.json":
            path = path.parent / suffix
        elif suffix:
            path = Path(f"{path}{suffix}") if suffix.startswith(".") else path.with_suffix(f".{suffix}")
        original = path.read_bytes()
        place = int(random.integers(length or len(original)))
        _put(place, bytes([original[place] ^ int(random.integers(1, 256))]))(path)
        expected = EXPECTED[name]
        try:
            documents = opened(copied / name, max(expected["ids"]) + 1)
            ids = documents.tokens(0, len(documents)).tolist()
            ends = [int(end) for part in index._all_ends(documents._shards, 0) for end in part]
            assert ids == expected["ids"], (name, place)
            assert _listed(documents.learned(0, len(ids))) == expected["learned"]
            if ends != expected["ends"]:
                assert _only_a_boundary(name, place, ends, expected["ends"]), (name, place)
                boundaries += 1
        except (JobError, DataError):
            caught += 1
        path.write_bytes(original)
    assert caught > 600
    assert boundaries < 100


@pytest.mark.parametrize(("column", "is_inverse"), [("loss_mask", False), ("plain", True)])
def test_a_column_of_streaming_is_the_mask(column: str, is_inverse: bool) -> None:
    documents = Memmap(path=str(FILES / "mds/masked"), format=Mds(mask_column=column), end_of_text=0).build(
        SimpleNamespace(job=SimpleNamespace(model=None), tokenizer=None, mesh=None)
    )
    ids = [id_ for number in range(8) for id_ in range(1, 2 + 3 * number)]
    assert documents.tokens(0, len(ids)).tolist() == ids
    assert documents.learned(0, len(ids)).tolist() == [(id_ % 3 > 0) != is_inverse for id_ in ids]


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("mask", ("index.json", "'mask'", "loss_mask", "mask_column")),
        ("id", ("index.json", "'str'")),
        ("tokens", ("entries are 0 or 1",)),
    ],
)
def test_what_is_no_mask_is_named(column: str, words: tuple[str, ...]) -> None:
    with pytest.raises(JobError) as caught:
        Memmap(path=str(FILES / "mds/masked"), format=Mds(mask_column=column), end_of_text=0).build(
            SimpleNamespace(job=SimpleNamespace(model=None), tokenizer=None, mesh=None)
        )
    assert not lacks(str(caught.value), *words)
