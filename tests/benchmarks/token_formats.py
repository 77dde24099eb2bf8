"""What files of other libraries cost dataset `memmap`, beside those of `data prepare`.

    python tests/benchmarks/token_formats.py [--tokens 50_000_000] [--shards 10_000] [--sparse 100_000_000_000]

Reading: 64 sequences of 1,024 tokens at random places, in microseconds, the least of several rounds. Start: a job's
check of many small shards of one format, in CPU seconds. Memory: of a process that reads all over a sparse file.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from forge_kit.data.token_file import TokenFileWriter
from forge_plugin_memmap import Memmap
from forge_plugin_memmap.documents import ShardedDocuments
from forge_plugin_memmap.formats.auto import installed_formats
from forge_plugin_memmap.formats.reading import read_shard
from forge_plugin_memmap.unpacking import unpacked

DOCUMENT = 500
"""Tokens of a document."""


def forge(stem: Path, ids: np.ndarray, ends: np.ndarray) -> Path:
    with TokenFileWriter(stem, 1 << 16, 0, may_contain_end=True) as writer:
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            writer.add("document", ids[start : end - 1])
    return stem.with_suffix(".bin")


def datatrove(stem: Path, ids: np.ndarray, ends: np.ndarray) -> Path:
    path = stem.with_suffix(".ds")
    ids.astype("<u2").tofile(path)
    ends.astype("<u8").tofile(f"{path}.index")
    Path(f"{path}.metadata").write_text(f"gpt2|2\n{len(ids)}\n1 T")
    return path


def dolma(stem: Path, ids: np.ndarray, ends: np.ndarray) -> Path:
    ids.astype("<u2").tofile(stem.with_suffix(".npy"))
    rows = (f"{start},{end},id,a.jsonl,1\r\n" for start, end in zip([0, *ends[:-1]], ends, strict=True))
    stem.with_suffix(".csv.gz").write_bytes(gzip.compress("".join(rows).encode(), 1))
    return stem.with_suffix(".npy")


def megatron(stem: Path, ids: np.ndarray, ends: np.ndarray) -> Path:
    ids.astype("<u2").tofile(stem.with_suffix(".bin"))
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(ends), len(ends) + 1)
    starts = np.concatenate([[0], ends[:-1]])
    tables = (ends - starts).astype("<i4").tobytes(), (2 * starts).astype("<i8").tobytes()
    stem.with_suffix(".idx").write_bytes(head + b"".join(tables) + np.arange(len(ends) + 1, dtype="<i8").tobytes())
    return stem.with_suffix(".bin")


def llm_c(stem: Path, ids: np.ndarray, ends: np.ndarray) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    stem.with_suffix(".bin").write_bytes(header.tobytes() + ids.astype("<u2").tobytes())
    return stem.with_suffix(".bin")


def litdata(stem: Path, ids: np.ndarray, ends: np.ndarray) -> Path:
    head = np.concatenate([[len(ends)], 4 * (len(ends) + 2) + 4 * np.concatenate([[0], ends])]).astype("<u4")
    path = stem.with_suffix(".bin")
    path.write_bytes(head.tobytes() + ids.astype("<i4").tobytes())
    # int32 is number 15 of litdata's types, which has no uint16
    config = {
        "compression": None,
        "encryption": None,
        "data_format": ["no_header_tensor:15"],
        "item_loader": "TokensLoader",
    }
    chunk = {"filename": path.name, "chunk_size": len(ends), "chunk_bytes": path.stat().st_size, "dim": len(ids)}
    _append(stem.with_name("index.json"), "chunks", chunk, {"config": config})
    return path


def mds(stem: Path, ids: np.ndarray, ends: np.ndarray) -> Path:
    described = {"column_names": ["tokens"], "column_encodings": ["ndarray:uint16"], "column_sizes": [None]}
    samples = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        # One dimension, whose length has four bytes
        value = struct.pack("<BI", 1 << 2 | 2, end - start) + ids[start:end].astype("<u2").tobytes()
        samples.append(struct.pack("<I", len(value)) + value)
    text = json.dumps(described).encode()
    begin = 4 * (len(samples) + 2) + len(text)
    places = begin + np.concatenate([[0], np.cumsum([len(sample) for sample in samples])])
    path = stem.with_suffix(".mds")
    path.write_bytes(struct.pack("<I", len(samples)) + places.astype("<u4").tobytes() + text + b"".join(samples))
    raw = {"basename": path.name, "bytes": path.stat().st_size, "hashes": {}}
    shard = {
        "version": 2,
        "format": "mds",
        "samples": len(samples),
        "compression": None,
        "raw_data": raw,
        "zip_data": None,
    }
    _append(stem.with_name("index.json"), "shards", {**described, **shard}, {"version": 2})
    return path


def _append(index: Path, key: str, entry: dict[str, Any], more: dict[str, Any]) -> None:
    table = json.loads(index.read_text()) if index.exists() else {key: [], **more}
    table[key].append(entry)
    index.write_text(json.dumps(table))


def columns(stem: Path, ids: np.ndarray, ends: np.ndarray) -> Path:
    path = stem.with_suffix(".parquet")
    offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
    parquet.write_table(pa.table({"input_ids": pa.ListArray.from_arrays(offsets, pa.array(ids))}), path)
    return path


FORMATS: dict[str, Callable[[Path, np.ndarray, np.ndarray], Path]] = {
    "forge": forge, "datatrove": datatrove, "dolma": dolma, "megatron": megatron, "llm_c": llm_c,
    "litdata": litdata, "mds": mds, "parquet": columns,
}  # fmt: skip


def corpus(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(0).integers(1, 1 << 16, tokens, dtype=np.uint16)
    ends = np.minimum(np.arange(DOCUMENT, tokens + DOCUMENT, DOCUMENT), tokens)
    ids[ends - 1] = 0
    return ids, ends


def reading(folder: Path, tokens: int, rounds: int) -> None:
    ids, ends = corpus(tokens)
    opened = {}
    for name, write in FORMATS.items():
        (folder / name).mkdir()
        shard, begin = read_shard(str(write(folder / name / "a", ids, ends))), time.perf_counter()
        opened[name] = ShardedDocuments(unpacked([shard]), 0)
        if shard.packed:
            print(f"unpack {name:9} {time.perf_counter() - begin:7.2f} s for {tokens:,} tokens")
    starts = np.random.default_rng(1).integers(0, tokens - 1024, 64).tolist()
    best = dict.fromkeys(opened, float("inf"))
    # In turn, so that the load of others meets all alike
    for _ in range(rounds):
        for name, documents in opened.items():
            begin = time.perf_counter()
            for start in starts:
                documents.tokens(start, start + 1024)
            best[name] = min(best[name], time.perf_counter() - begin)
    for name, seconds in best.items():
        print(f"read  {name:10} {1e6 * seconds:7.0f} us  {seconds / best['forge']:.3f} of forge")


def start(folder: Path, shards: int) -> None:
    installed_formats()
    ids, ends = corpus(64)
    for name, write in FORMATS.items():
        (folder / f"many-{name}").mkdir()
        for number in range(shards):
            write(folder / f"many-{name}" / f"{number:05}", ids, ends)
        seconds = []  # of CPU time: a busy machine adds its own
        for _ in range(3):
            begin = time.process_time()
            Memmap(path=str(folder / f"many-{name}"), end_of_text=0).corpus()
            seconds.append(time.process_time() - begin)
        print(f"start {name:10} {min(seconds):7.2f} CPU s for {shards} shards")


def memory(folder: Path, size: int) -> None:
    path = folder / "sparse.ds"
    with path.open("wb") as file:
        file.truncate(size)
    np.array([size // 2], "<u8").tofile(f"{path}.index")
    documents = ShardedDocuments([read_shard(str(path))], 0)
    peaks = []
    for seed in range(4):
        for begin in np.random.default_rng(seed).integers(0, len(documents) - 1024, 20_000).tolist():
            documents.tokens(begin, begin + 1024)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    print(f"memory: peak after each 20,000 sequences of {size / 1e9:.0f} GB: {', '.join(map(str, peaks))} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=50_000_000)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--sparse", type=int, default=100_000_000_000)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ["FORGE_CACHE"] = f"{name}/cache"
        memory(Path(name), options.sparse)
        reading(Path(name), options.tokens, options.rounds)
        start(Path(name), options.shards)


if __name__ == "__main__":
    main()
