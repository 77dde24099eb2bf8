"""Files of data are looked at once per run, whatever the number of ranks: not once per rank."""

from __future__ import annotations

import io
import os
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
from attrs import evolve
from PIL import Image
from torch.distributed.device_mesh import init_device_mesh

from forge_core.config.rules import check_rules
from forge_core.contracts.components import DatasetComponent
from forge_core.contracts.errors import JobError
from forge_core.data.packing import Concatenate
from forge_core.engine.build import build_context, build_datasets, build_tokenizer
from forge_core.plugins.catalog import Catalog
from forge_plugin_huggingface import HuggingFace
from forge_plugin_images import ImageText, ImageTextStream
from forge_plugin_memmap import Memmap
from forge_plugin_text import Bytes, Text, corpus
from forge_plugin_text.bytes import ByteTokenizer
from forge_testing import tiny_job
from forge_testing.images import tiny_model
from forge_testing.processes import run_on_ranks

FILES = 12


def write_shards(folder: Path) -> DatasetComponent:
    for number in range(FILES):
        np.save(folder / f"{number}.npy", np.uint16([1, 2, 256]))
    return Memmap(path=str(folder), end_of_text=256)


def write_texts(folder: Path) -> DatasetComponent:
    for number in range(FILES):
        (folder / f"{number}.txt").write_text("text")
    return Text(path=str(folder))


def write_rows(folder: Path, **keys: Any) -> DatasetComponent:
    for number in range(FILES):
        datasets.Dataset.from_list([{"text": "text"}] * 2).to_parquet(str(folder / f"{number}.parquet"))
    return HuggingFace(path=str(folder), **keys)


def write_saved(folder: Path, **keys: Any) -> DatasetComponent:
    datasets.Dataset.from_list([{"text": "text"}] * FILES).save_to_disk(str(folder), num_shards=FILES)
    return HuggingFace(path=str(folder), **keys)


def pictures(rows: int) -> datasets.Dataset:
    data = io.BytesIO()
    Image.new("RGB", (16, 8)).save(data, "PNG")
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    row = {"image": {"bytes": data.getvalue(), "path": None}, "text": "text"}
    return datasets.Dataset.from_list([row] * rows, features=features)


def write_picture_rows(folder: Path) -> None:
    for number in range(FILES):
        pictures(2).to_parquet(str(folder / f"{number}.parquet"))


def write_saved_pictures(folder: Path) -> None:
    pictures(FILES).save_to_disk(str(folder), num_shards=FILES)


def count_calls(folder: Path) -> Counter[str]:
    """Count calls of this process, from now on, that look at a file in a folder."""
    counts = Counter[str]()

    def note(path: Any) -> None:
        if isinstance(path, str | os.PathLike) and Path(path).parent == folder:
            counts[Path(path).name] += 1

    for name in ("stat", "lstat"):
        function = getattr(os, name)

        def noting(path: Any, *arguments: Any, function: Any = function, **options: Any) -> Any:
            note(path)
            return function(path, *arguments, **options)

        setattr(os, name, noting)
    sys.addaudithook(lambda event, arguments: note(arguments[0]) if event == "open" else None)
    return counts


def start(component: DatasetComponent) -> tuple[int, list[int]]:
    """What each rank does with a dataset at its start.

    Returns:
        The tokens, or lanes of a stream, and how often this rank looked at each file.
    """
    tokenizer = ByteTokenizer()
    train = SimpleNamespace(seq_len=4, global_batch_size=2)
    data = SimpleNamespace(tokenizer=object(), seed=0, packing=Concatenate())
    job: Any = SimpleNamespace(train=train, data=data, model=SimpleNamespace(vocab_size=0), job=SimpleNamespace(seed=0))
    context: Any = SimpleNamespace(job=job, tokenizer=tokenizer, mesh=init_device_mesh("cpu", (2,)))
    counts = count_calls(Path(component.path))
    assert not list(component.problems(job, None))
    documents: Any = component.build(context)
    list(component.choices(context))
    return getattr(documents, "lanes", 0) or len(documents), [count for count in counts.values() if count]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(corpus, "SETTLED_AFTER_NS", -(1 << 62))  # as if the files were old
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    datasets.disable_progress_bars()
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("write", "of_rank0", "of_rank1"),
    [
        (write_shards, 2, 1),
        (write_texts, 1, 0),
        (write_rows, 5, 0),
        (partial(write_rows, streaming=True), 5, 0),
        (write_saved, 4, 0),
        (partial(write_saved, streaming=True), 7, FILES),  # whose rows it reads: each is mapped
    ],
)
def test_rank_0_looks_at_files_for_all(folder: Path, write: Any, of_rank0: int, of_rank1: int) -> None:
    component = write(folder)
    run_on_ranks(2, lambda rank: start(component))  # reads the ids, or tokenises
    (tokens, first), (same, second) = run_on_ranks(2, lambda rank: start(component))
    assert tokens == same > 0
    assert sum(first) <= of_rank0 * FILES + 2  # and whether any text has a byte
    assert sum(second) <= of_rank1


@pytest.mark.parametrize(
    ("write", "dataset", "of_rank0", "of_rank1"),
    [
        (write_picture_rows, ImageText, 6, 0),
        (write_saved_pictures, ImageText, 7, FILES),  # each is mapped
        (write_picture_rows, ImageTextStream, 6, 0),
        (write_saved_pictures, ImageTextStream, 7, FILES),
    ],
)
def test_rank_0_looks_at_tables_of_images_for_all(
    folder: Path, tmp_path: Path, write: Any, dataset: Any, of_rank0: int, of_rank1: int
) -> None:
    write(folder)
    catalog = Catalog.installed()
    sources = {"sources": (dataset(path=str(folder)),), "tokenizer": Bytes()}
    model = tiny_model(8, 16, images_per_sequence=2)
    job = tiny_job(str(tmp_path / "runs"), catalog, data=sources, model=model, seq_len=24)

    def start_run(rank: int) -> list[int]:
        counts = count_calls(folder)
        assert not check_rules(job, catalog)
        context = build_context(job, catalog, None)
        [built] = build_datasets(job, evolve(context, tokenizer=build_tokenizer(job, context)))
        assert getattr(built, "lanes", 0) or len(built)
        return [count for count in counts.values() if count]

    run_on_ranks(2, start_run)  # measures the images
    first, second = run_on_ranks(2, start_run)
    assert sum(first) <= of_rank0 * FILES + 2
    assert sum(second) <= of_rank1


def test_what_is_wrong_on_rank_0_ends_all_ranks(folder: Path) -> None:
    np.save(folder / "a.npy", np.uint16([1, 2, 300]))  # beyond the tokenizer's ids
    component = Memmap(path=str(folder), end_of_text=256)

    def problems(rank: int) -> list[str]:
        with pytest.raises(JobError) as caught:
            start(component)
        return [problem.message for problem in caught.value.problems]

    first, second = run_on_ranks(2, problems)
    assert first == second
    assert "token 2 is 300" in first[0]
