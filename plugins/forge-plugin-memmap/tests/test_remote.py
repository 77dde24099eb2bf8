"""Shards in object stores and on web servers are read where they lie: by blocks, from a cache of a fixed size."""

from __future__ import annotations

import functools
import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from forge_core.contracts.errors import DataError, JobError
from forge_plugin_memmap import Memmap, block_cache, remote
from forge_plugin_memmap.block_cache import WAYS, BlockCache
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import lacks

FOREIGN = Path(__file__).parent / "foreign"


class Ranges(SimpleHTTPRequestHandler):
    """Serves files, and parts of them, as object stores do."""

    def do_GET(self) -> None:
        asked = self.headers.get("Range", "")
        path = self.translate_path(self.path)
        if not asked or not os.path.isfile(path) or not self.server.answers_ranges:
            super().do_GET()
            return
        first, last = asked.removeprefix("bytes=").split("-")
        size = os.path.getsize(path)
        start, stop = int(first), min(int(last) + 1, size) if last else size
        self.server.ranges.append((os.path.basename(path), stop - start))
        self.send_response(206)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        with open(path, "rb") as file:
            file.seek(start)
            self.wfile.write(file.read(stop - start))

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(here: Path) -> Iterator[Any]:
    """A web server for the current directory: its `address`, the `ranges` that were asked for, as (name, bytes)."""
    handler = functools.partial(Ranges, directory=str(here))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        served.ranges, served.answers_ranges = [], True
        served.address = f"http://127.0.0.1:{served.server_port}"
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield served
        served.shutdown()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without pauses between attempts; and nothing in fsspec's memory."""
    monkeypatch.setattr(remote, "PAUSE_S", 0.0)
    yield
    fsspec.filesystem("memory").store.clear()


def put_in_memory(folder: str, bucket: str = "bucket") -> str:
    """Copy a folder to fsspec's memory; returns its address."""
    system = fsspec.filesystem("memory")
    for path in Path(folder).rglob("*"):
        if path.is_file():
            system.pipe_file(f"/{bucket}/{path.relative_to(folder)}", path.read_bytes())
    return f"memory://{bucket}"


def demand_same(here: Any, there: Any) -> None:
    """Documents are the same, at random places too."""
    assert len(there) == len(here)
    assert there.tokens(0, len(here)).tolist() == here.tokens(0, len(here)).tolist()
    assert there.ends().tolist() == here.ends().tolist()
    mask = here.learned(0, len(here))
    assert mask is None or there.learned(0, len(here)).tolist() == mask.tolist()


@pytest.fixture
def data(prepare: Callable[..., str]) -> None:
    """The folder `data`: some shards of both splits."""
    rows = [{"text": f"text {number} " * (number % 5), "id": str(number)} for number in range(60)]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare("a.jsonl", "--out=data", "--held-out-every=5", "--shard-tokens=400")


@pytest.mark.parametrize("store", ["memory", "file", "http"])
def test_a_folder_of_data_prepare_is_the_same_in_any_store(
    data: None, open_documents: Callable[..., Any], server: Any, store: str
) -> None:
    here = open_documents(path="data")
    address = {
        "memory": lambda: put_in_memory("data"),
        "file": lambda: f"file://{Path('data').absolute()}",
        "http": lambda: f"{server.address}/data/",
    }[store]()
    there = open_documents(path=address, remote_cache_gb=0.02)
    demand_same(here, there)
    demand_same(here.held_out, there.held_out)
    assert there.bytes_per_token == here.bytes_per_token
    assert there.where(0, 3).startswith(f"tokens 0 to 3 of {address.partition('//')[0]}//")
    # In a worker process
    demand_same(here, pickle.loads(pickle.dumps(there)))
    assert there.origins(np.array([3]))[0].id == here.origins(np.array([3]))[0].id
    there.verify()


@pytest.mark.parametrize("format", ["datatrove", "dolma", "litdata", "llm_c", "mds/array", "megatron"])
def test_formats_of_others_are_the_same_in_a_store(open_documents: Callable[..., Any], format: str) -> None:
    shutil.copytree(FOREIGN / format, "files")
    keys = {"end_of_text": 0}
    here, there = (open_documents(path=path, **keys) for path in ("files", put_in_memory("files")))
    demand_same(here, there)
    # Its index is in order; one that belongs to other data is named, as on a disk
    system = fsspec.filesystem("memory")
    name = next(path for path in sorted(system.find("/bucket")) if path.endswith((".ds", ".npy", ".bin", ".mds")))
    system.pipe_file(name, system.cat_file(name)[:-2])
    with pytest.raises(JobError, match=os.path.basename(name).partition(".")[0]):
        open_documents(path="memory://bucket", **keys)


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl"])
def test_columns_are_unpacked_from_a_store(open_documents: Callable[..., Any], suffix: str) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"input_ids": [[1, 2, 0], [3, 0]], "mask": [[True, False, True], [True, True]]})
    os.mkdir("files")
    if suffix == "parquet":
        parquet.write_table(table, "files/a.parquet")
    elif suffix == "arrow":
        with pa.OSFile("files/a.arrow", "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        Path("files/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    there = open_documents(path=put_in_memory("files"), end_of_text=0)
    assert there.tokens(0, 9).tolist() == [1, 2, 0, 3, 0]


def test_a_check_asks_for_no_shard_and_a_run_for_blocks_once(
    data: None, server: Any, problems: Callable[..., Any], open_documents: Callable[..., Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr(block_cache, "BLOCK", 256)
    monkeypatch.setattr(BlockCache.__init__, "__defaults__", (256,))
    keys = {"path": f"{server.address}/data/", "remote_cache_gb": 0.02}
    assert not problems(**keys)
    heads = {size for name, size in server.ranges if name.endswith(".bin")}
    assert max(heads) <= 4096
    there = open_documents(**keys)
    server.ranges.clear()
    first = there.tokens(100, 140).tolist()
    asked = [size for name, size in server.ranges if name.endswith(".bin")]
    assert asked
    assert sum(asked) < os.path.getsize("data/train-00000.bin") + 1024
    # Of another process of this machine, too
    server.ranges.clear()
    again = open_documents(**keys)
    server.ranges.clear()
    assert again.tokens(100, 140).tolist() == first
    assert not [size for name, size in server.ranges if name.endswith(".bin")]


def test_a_file_that_was_written_again_is_another_one(data: None, open_documents: Callable[..., Any]) -> None:
    address = put_in_memory("data")
    before = open_documents(path=address)
    ids = before.tokens(0, 50).tolist()
    assert open_documents(path=address).identity() == before.identity()
    put_in_memory("data")
    after = open_documents(path=address)
    assert after.identity() != before.identity()
    assert after.tokens(0, 50).tolist() == ids
    # Cut while the run goes on
    system = fsspec.filesystem("memory")
    name = "/bucket/train-00001.bin"
    system.pipe_file(name, system.cat_file(name)[:-200])
    with pytest.raises(DataError, match=r"memory:///bucket/train-00001\.bin"):
        after.tokens(0, len(after))


def test_addresses_that_cannot_be_used_are_named(
    data: None, problems: Callable[..., Any], server: Any, open_documents: Callable[..., Any], monkeypatch: Any
) -> None:
    address = put_in_memory("data")
    for path in ("https://me:secret@host/data", "https://host/data?X-Amz-Signature=secret"):
        [problem] = problems(path=path)
        assert not lacks(str(problem), "https://host/data", "credentials")
        assert "secret" not in str(problem)
    assert not lacks(str(problems(path="memory://bucket/none/")[0]), "memory://bucket/none/", "no such file")
    assert "nostore" in str(problems(path="nostore://bucket/data")[0])
    system = fsspec.filesystem("memory")
    system.rm("/bucket/train-00000.ends")
    assert not lacks(str(problems(path=address)[0]), "memory:///bucket/train-00000.ends", "manifest")
    with pytest.raises(JobError, match=r"remote_cache_gb: .*larger than the room"):
        open_documents(path=put_in_memory("data"), remote_cache_gb=1e9)
    # Python's own server sends whole files
    server.answers_ranges = False
    with pytest.raises(OSError, match="one that answers ranges"):
        remote.read_range(f"{server.address}/data/train-00000.bin", 64, 80)


def test_a_store_that_fails_for_a_moment_is_asked_again(
    data: None, open_documents: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = open_documents(path=put_in_memory("data"))
    ids = there.tokens(0, 9).tolist()
    whole, failures = fsspec.implementations.memory.MemoryFileSystem.cat_file, iter([1, 1])

    def cat_file(self: Any, *given: Any, **more: Any) -> bytes:
        if next(failures, 0):
            raise TimeoutError("no answer")
        return whole(self, *given, **more)

    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "cat_file", cat_file)
    shutil.rmtree(block_cache.cache_root() / "remote")
    block_cache._cache_of.cache_clear()
    assert there.tokens(0, 9).tolist() == ids


# --- the cache ---------------------------------------------------------------------------------------------------


def content_of(name: str, number: int, size: int) -> bytes:
    return bytes((len(name) * 7 + number * 31 + place) % 251 for place in range(size))


def hammer(folder: Path, seed: int) -> list[tuple[str, int]]:
    """Read many blocks through a cache that is far too small, and return those that differ."""
    failures = []
    cache, random = BlockCache(folder, 64 * 4096, 4096), np.random.default_rng(seed)
    for _ in range(1500):
        name, number = "f" * int(random.integers(1, 9)), int(random.integers(0, 40))
        size = 4096 - (number % 3) * 100
        expected = content_of(name, number, size)
        if cache.read(name, number, size, slice(99, size), lambda expected=expected: expected) != expected[99:]:
            failures.append((name, number))
    return failures


def test_processes_share_it_and_none_gets_a_block_of_another(tmp_path: Path) -> None:
    assert run_on_ranks(3, lambda rank: hammer(tmp_path / "c", rank)) == [[], [], []]
    size = sum(path.stat().st_blocks * 512 for path in (tmp_path / "c").rglob("blocks"))
    assert 0 < size <= 64 * 4096


def test_what_fits_is_fetched_once_and_the_first_goes_first(tmp_path: Path) -> None:
    cache, fetched = BlockCache(tmp_path, WAYS * 64, 64), []

    def read(number: int) -> None:
        def fetch() -> bytes:
            fetched.append(number)
            return content_of("a", number, 64)

        assert cache.read("a", number, 64, slice(0, 64), fetch) == content_of("a", number, 64)

    for number in [*range(WAYS), *range(WAYS)]:
        read(number)
    assert fetched == [*range(WAYS)]
    read(WAYS)
    read(1)
    assert fetched == [*range(WAYS), WAYS]
    read(0)
    assert fetched == [*range(WAYS), WAYS, 0]
    # After a crash of the machine nothing of it is trusted
    next(tmp_path.glob("*/boot")).write_text("before")
    cache = BlockCache(tmp_path, WAYS * 64, 64)
    read(0)
    assert fetched[-1] == 0
    with pytest.raises(DataError, match="block 5 has 3 bytes, not 64"):
        cache.read("b", 5, 64, slice(0, 9), lambda: b"abc")


def test_a_block_that_is_replaced_while_it_is_read_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, other = BlockCache(tmp_path, WAYS * 64, 64), BlockCache(tmp_path, WAYS * 64, 64)

    def read(of: BlockCache, number: int) -> bytes:
        return of.read("a", number, 64, slice(0, 64), lambda: content_of("a", number, 64))

    read(cache, 0)
    pread, rounds = os.pread, iter([True])

    def slow(*given: int) -> bytes:
        # Another process takes all slots of the set between the look at the index and the reading
        if next(rounds, False):
            for number in range(1, WAYS + 1):
                read(other, number)
        return pread(*given)

    monkeypatch.setattr(block_cache.os, "pread", slow)
    assert read(cache, 0) == content_of("a", 0, 64)


def test_a_process_that_dies_while_it_fills_a_slot_leaves_none_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlockCache(tmp_path, WAYS * 64, 64)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(block_cache, "_write", die)
        with pytest.raises(KeyboardInterrupt):
            cache.read("a", 0, 64, slice(0, 64), lambda: bytes(64))
    assert cache.read("a", 0, 64, slice(0, 64), lambda: b"x" * 64) == b"x" * 64
    assert cache.read("a", 0, 64, slice(0, 64), lambda: b"") == b"x" * 64


def test_a_job_states_the_size_of_its_cache() -> None:
    assert Memmap(path="memory://bucket").remote_cache_gb == 16
