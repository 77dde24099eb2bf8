"""Writes the files in this folder with the libraries whose formats Forge reads, and `expected.json` as they read them.

Run it in an environment of its own, which has datatrove, dolma, litdata, mosaicml-streaming and torch:

    python write.py INDEXED_DATASET

INDEXED_DATASET is the file megatron/core/datasets/indexed_dataset.py of Megatron-LM, which is loaded without the rest.
The documents are of three splits: some end with the end-of-text (id 0), some do not.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import importlib.util
import itertools
import json
import os
import shutil
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
EXPECTED: dict[str, dict[str, Any]] = {}


def documents(seed: int, count: int, vocab_size: int, end: bool = True) -> list[np.ndarray]:
    """Documents of 1 to 40 ids; with `end`, the last of each is 0, which is nowhere else."""
    random = np.random.default_rng(seed)
    made = [random.integers(1, vocab_size, random.integers(1, 40)) for _ in range(count)]
    return [np.append(ids, 0) if end else ids for ids in made]


def note(name: str, read_back: list[np.ndarray], masks: list[np.ndarray] | None = None) -> None:
    """Record what the library reads from a file, by the name of the data file."""
    ids = np.concatenate(read_back)
    EXPECTED[name] = {
        "ids": [int(id_) for id_ in ids],
        "ends": np.cumsum([len(part) for part in read_back]).tolist(),
        "learned": None if masks is None else [int(bit) for bit in np.concatenate(masks)],
    }


def write_datatrove(folder: Path) -> None:
    TokenizedFile = import_module("datatrove.pipeline.tokens.tokenizer").TokenizedFile

    def read(name: str, width: int) -> list[np.ndarray]:
        # As `datatrove.utils.dataset.DatatroveFileDataset` and the merger read: numbers and ends
        ends = np.fromfile(folder / f"{name}.index", "<u8")
        return np.split(np.fromfile(folder / name, f"<u{width}"), ends[:-1].astype(int))

    for name, width, vocab_size, masked, metadata, end in (
        ("masked.ds", 2, 60_000, True, True, True),
        ("wide.ds", 4, 150_000, False, True, True),
        ("plain.ds", 2, 300, False, False, False),
    ):
        tokenizer = "gpt2" if metadata else None
        file = TokenizedFile(
            str(folder), name, save_loss_metadata=masked, save_final_metadata=metadata, token_size=width,
            tokenizer_name_or_path=tokenizer,
        )  # fmt: skip
        random = np.random.default_rng(7)
        masks = []
        for ids in documents(width, 20, vocab_size, end):
            masks.append(random.integers(0, 2, len(ids)).astype(bool))
            file.write(ids.tolist(), masks[-1] if masked else None)
        file.close()
        note(f"datatrove/{name}", read(name, width), masks if masked else None)


def write_dolma(folder: Path) -> None:
    # The packages themselves import classifiers of text
    stand_in("dolma", "dolma.core", "dolma.tokenizer")
    TokenizerOutput = import_module("dolma.tokenizer.data_types").TokenizerOutput
    MemmapWriter = import_module("dolma.tokenizer.memmap_writer").MemmapWriter

    for name, dtype, vocab_size in (("part-0-00000", "uint16", 50_000), ("part-1-00000", "uint32", 100_000)):
        with MemmapWriter(str(folder / name), np.dtype(dtype), max_tokens=10_000) as writer:
            for number, ids in enumerate(documents(len(dtype) + vocab_size, 20, vocab_size)):
                output = TokenizerOutput.from_tokens(
                    tokens=ids.tolist(), id=f"document {number}", src="a, b.jsonl", loc=number
                )
                assert writer.write(output)
        ids = np.memmap(folder / f"{name}.npy", dtype=dtype, mode="r")
        with gzip.open(folder / f"{name}.csv.gz", "rt") as file:
            read_back = [ids[int(start) : int(end)] for start, end, *_ in csv.reader(file)]
        note(f"dolma/{name}.npy", read_back)


def write_megatron(folder: Path, source: Path) -> None:
    module = load_megatron(source)
    for name, dtype, vocab_size, parts in (
        ("wide_text_document", np.int32, 150_000, 1),
        ("text_sentence", np.uint16, 60_000, 3),
    ):
        stem = str(folder / name)
        builder = module.IndexedDatasetBuilder(stem + ".bin", dtype=dtype)
        for ids in documents(parts, 20, vocab_size, end=parts == 1):
            # Documents of several sequences, as of sentences
            lengths = [len(part) for part in np.array_split(ids, parts) if len(part)]
            builder.add_document(ids, lengths)
        builder.finalize(stem + ".idx")
        dataset = module.IndexedDataset(stem)
        bounds = dataset.document_indices
        read_back = [
            np.concatenate([dataset[number] for number in range(first, last)])
            for first, last in itertools.pairwise(bounds)
        ]
        note(f"megatron/{name}.bin", read_back)


def load_megatron(source: Path) -> Any:
    """The module of Megatron-LM, with stand-ins for modules that it imports for remote storage and logging."""
    for name in ("megatron", "megatron.core", "megatron.core.datasets"):
        sys.modules[name] = types.ModuleType(name)
    storage = types.ModuleType("megatron.core.datasets.object_storage_utils")
    storage.S3Config = storage.ObjectStorageConfig = type("Config", (), {})
    storage.is_object_storage_path = lambda path: False
    for name in ("cache_index_file", "dataset_exists", "get_index_cache_path", "get_object_storage_access"):
        setattr(storage, name, None)
    storage.parse_s3_path = None
    client = types.ModuleType("megatron.core.msc_utils")
    client.maybe_msc = types.SimpleNamespace(open=open, os=os)
    client.MultiStorageClientFeature = types.SimpleNamespace(is_enabled=lambda: False)
    utils = types.ModuleType("megatron.core.utils")
    utils.log_single_rank = lambda *arguments, **keys: None
    for module in (storage, client, utils):
        sys.modules[module.__name__] = module
    spec = importlib.util.spec_from_file_location("megatron.core.datasets.indexed_dataset", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_llm_c(folder: Path) -> None:
    """As `write_datafile` of llm.c (dev/data/data_common.py) does, which is no package."""
    for name, magic, version, dtype, vocab_size in (
        ("gpt2_train_000001", 20240520, 1, "<u2", 50_257),
        ("llama3_train_000001", 20240801, 7, "<u4", 128_256),
    ):
        # Documents begin with the end-of-text there
        ids = np.concatenate([np.roll(ids, 1) for ids in documents(version, 20, vocab_size)]).astype(dtype)
        header = np.zeros(256, "<i4")
        header[:3] = magic, version, len(ids)
        (folder / f"{name}.bin").write_bytes(header.tobytes() + ids.tobytes())
        note(f"llm_c/{name}.bin", np.split(ids, np.flatnonzero(ids == 0) + 1))


def write_litdata(folder: Path) -> None:
    torch = import_module("torch")
    BinaryWriter = import_module("litdata.streaming.writer").BinaryWriter
    loaders = import_module("litdata.streaming.item_loader")
    for name, convert in (
        ("tensor", lambda ids: torch.from_numpy(ids.astype(np.int32))),
        ("numpy", lambda ids: ids.astype(np.uint16)),
    ):
        writer = BinaryWriter(str(folder / name), chunk_bytes=600, item_loader=loaders.TokensLoader(block_size=1))
        for number, ids in enumerate(documents(len(name), 20, 60_000)):
            writer[number] = convert(ids)
        writer.done()
        writer.merge()
        index = json.loads((folder / name / "index.json").read_text())
        loader = loaders.TokensLoader(block_size=1)
        loader.setup(index["config"], index["chunks"], import_module("litdata.streaming.serializers")._SERIALIZERS)
        for number, chunk in enumerate(index["chunks"]):
            path = folder / name / chunk["filename"]
            arguments = number, str(path), 0, chunk["chunk_bytes"]
            blocks = [loader.load_item_from_chunk(place, *arguments) for place in range(chunk["dim"])]
            # The reader has no documents: their bounds are those of the items, by litdata's own header
            bounds = np.fromfile(path, "<u4", chunk["chunk_size"] + 1, offset=4).astype(int)
            ids = np.concatenate([np.asarray(block) for block in blocks])
            note(f"litdata/{name}/{path.name}", np.split(ids, ((bounds - bounds[0]) // ids.itemsize)[1:-1]))


def write_mds(folder: Path) -> None:
    stand_in("streaming", "streaming.base", "streaming.base.format", "streaming.base.format.base")
    MDSWriter = import_module("streaming.base.format.mds.writer").MDSWriter
    MDSReader = import_module("streaming.base.format.mds.reader").MDSReader
    for name, encoding, compression, dtype in (
        ("array", "ndarray:int32", None, np.int32),
        ("open", "ndarray", "zstd", np.uint16),
        ("bytes", "bytes", None, np.int64),
        ("fixed", "ndarray:uint32:16", None, np.uint32),
    ):
        columns = {"tokens": encoding, "id": "str", "length": "int"}
        keys = {"columns": columns, "out": str(folder / name), "size_limit": 1500, "compression": compression}
        with MDSWriter(**keys, hashes=["sha1"] if name == "array" else None) as writer:
            for number, made in enumerate(documents(len(name), 20, 60_000)):
                ids = (np.resize(made, 16) if name == "fixed" else made).astype(dtype)
                value = ids.tobytes() if name == "bytes" else ids
                writer.write({"tokens": value, "id": f"document {number}", "length": len(ids)})
        for shard in json.loads((folder / name / "index.json").read_text())["shards"]:
            raw, packed = folder / name / shard["raw_data"]["basename"], shard["zip_data"]
            if packed:
                data = (folder / name / packed["basename"]).read_bytes()
                raw.write_bytes(import_module("zstandard").ZstdDecompressor().decompress(data))
            reader = MDSReader.from_json(str(folder), name, shard)
            read_back = [reader[number]["tokens"] for number in range(len(reader))]
            if packed:
                raw.unlink()
            read_back = [np.frombuffer(ids, dtype) if name == "bytes" else ids for ids in read_back]
            note(f"mds/{name}/{(packed or shard['raw_data'])['basename']}", read_back)
    write_masked_mds(folder)


def write_masked_mds(folder: Path) -> None:
    """Samples with masks, whose contents are those of the test that reads them."""
    stand_in("streaming", "streaming.base", "streaming.base.format", "streaming.base.format.base")
    MDSWriter = import_module("streaming.base.format.mds.writer").MDSWriter
    columns = {"tokens": "ndarray:int32", "loss_mask": "ndarray:uint8", "plain": "bytes", "id": "str"}
    with MDSWriter(columns=columns, out=str(folder / "masked"), size_limit=700) as writer:
        for number in range(8):
            ids = np.arange(1, 2 + 3 * number, dtype=np.int32)
            mask = (ids % 3 > 0).astype(np.uint8)
            sample = {"tokens": ids, "loss_mask": mask, "plain": (1 - mask).tobytes(), "id": f"document {number}"}
            writer.write(sample)


def stand_in(*packages: str) -> None:
    """Import modules of packages without what the packages themselves import, which need not be installed."""
    installed = Path(importlib.util.find_spec("datatrove").origin).parents[1]
    for name in packages:
        package = types.ModuleType(name)
        package.__path__ = [str(installed / name.replace(".", "/"))]
        sys.modules[name] = package


WRITERS = {
    "datatrove": write_datatrove,
    "dolma": write_dolma,
    "megatron": write_megatron,
    "llm_c": write_llm_c,
    "litdata": write_litdata,
    "mds": write_mds,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("indexed_dataset", type=Path)
    source = parser.parse_args().indexed_dataset
    for name, write in WRITERS.items():
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write(folder, *([source] if name == "megatron" else []))
    (HERE / "expected.json").write_text(json.dumps(EXPECTED) + "\n")


if __name__ == "__main__":
    main()
