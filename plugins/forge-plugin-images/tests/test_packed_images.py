"""Rows of several documents: planned by the index, equal to the documents alone, resumed to the patch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from forge_core.checkpoint.state import Progress
from forge_core.data.loader import TrainLoader
from forge_core.data.reading import collate
from forge_core.engine.build import build_context, build_datasets, build_run, build_tokenizer
from forge_plugin_images import ImageText
from forge_plugin_images.index import ENTRY
from forge_plugin_images.plan import packed
from forge_plugin_images.rows import Needs
from forge_plugin_text.packing import BestFit
from forge_plugin_vision import IMAGE
from forge_testing.documents import RandomDocuments
from forge_testing.images import tiny_model
from forge_testing.processes import run_on_ranks

MODEL = tiny_model(8, 48, any_size=True, images_per_sequence=3, patches_per_sequence=18)
SETTINGS = {"model": MODEL, "seq_len": 40, "data": {"packing": BestFit()}}


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Captions of 14 images of different sizes and contents."""
    generator = np.random.default_rng(0)
    lines = []
    for number in range(14):
        shape = (8, 8 * (1 + number % 5), 3)
        Image.fromarray(generator.integers(0, 256, shape, np.uint8)).save(tmp_path / f"{number}.png")
        lines.append({"image": f"{number}.png", "text": "a text of some length"[: 3 + 2 * number % 11]})
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(tmp_path / "pairs.jsonl")


needs = st.tuples(st.integers(1, 20), st.integers(0, 12), st.integers(0, 3))


@given(documents=st.lists(needs, min_size=1, max_size=60))
def test_each_document_is_in_one_row_that_has_room_for_it(documents):
    room, entries = Needs(20, 12, 3), np.zeros(len(documents) + 1, ENTRY)
    for name, values in zip(room._fields, zip(*documents, strict=True), strict=True):
        entries[name][1:] = values
    plan = packed(np.arange(1, len(entries)), entries, room)
    assert sorted(plan.documents) == list(range(1, len(entries)))
    for name, most in room._asdict().items():
        assert max(entries[name][plan[row]].sum() for row in range(len(plan))) <= most


def test_documents_that_fill_rows_exactly_waste_nothing():
    entries = np.zeros(40, ENTRY)
    entries["positions"], entries["patches"] = [7, 13] * 20, [9, 3] * 20
    plan = packed(np.arange(40), entries, Needs(20, 12, 2))
    assert len(plan) == 20


def test_a_packed_row_has_whole_documents_side_by_side(build, path):
    data = build(ImageText(path=path), **SETTINGS)
    assert len(data) < 14
    assert sorted(place for row in range(len(data)) for place in data.where(row).split("; ")) == sorted(
        f"{path}:{line}" for line in range(1, 15)
    )
    for index in range(len(data)):
        row = data[index]
        images = int((row["grids"].prod(-1) > 0).sum())
        last_of_image = np.flatnonzero((row["input_ids"][:-1] == IMAGE) & (row["input_ids"][1:] != IMAGE))
        assert len(last_of_image) == images
        assert (row["labels"][last_of_image] == row["input_ids"][last_of_image + 1]).all()
        assert (row["labels"][row["input_ids"] == IMAGE] >= 0).sum() == images
        assert (row["positions"][np.flatnonzero(np.diff(row["document_ids"])) + 1] == 0).all()
        assert data.cost(index) == row["grids"].prod(-1).sum()


def test_a_packed_row_has_the_losses_of_its_documents_alone(make_job, path, catalog):
    def loss(**settings):
        job = make_job(ImageText(path=path), **{**SETTINGS, **settings}, precision="fp64")
        run = build_run(job, build_context(job, catalog, None))
        [data] = run.datasets
        sums, counts = run.executor.evaluate([collate([data[row] for row in range(len(data))])]).per_sequence
        return len(data), sums.sum().item(), int(counts.sum())

    rows, packed_sum, packed_count = loss()
    rows_alone, sum_alone, count_alone = loss(data={})
    assert rows < rows_alone == 14
    assert packed_count == count_alone
    assert packed_sum == pytest.approx(sum_alone, rel=1e-12)


def test_packed_text_mixes_with_packed_images(make_job, path, catalog):
    job = make_job(ImageText(path=path), **SETTINGS, global_batch_size=8)
    sources = (*job.data.sources, RandomDocuments(longest=20))
    job = attrs.evolve(job, data=attrs.evolve(job.data, sources=sources))
    context = build_context(job, catalog, None)
    context = attrs.evolve(context, tokenizer=build_tokenizer(job, context))
    loader = TrainLoader(job, build_datasets(job, context), context)
    [batch] = loader.next_step()
    loader.close()
    assert set(batch["sources"].tolist()) == {0, 1}
    has_image = batch["patches"].flatten(1).any(1)
    assert has_image.tolist() == (batch["sources"] == 0).tolist()


def fingerprints(job, catalog, steps, progress=None):
    """SHA-256 of the patches of this rank's rows by their numbers, step by step, and the position after them."""
    context = build_context(job, catalog, None)
    context = attrs.evolve(context, tokenizer=build_tokenizer(job, context))
    loader = TrainLoader(job, build_datasets(job, context), context, progress)
    try:
        rows = [dict(pair for batch in loader.next_step() for pair in digests(batch)) for _ in range(steps)]
        return rows, json.loads(json.dumps(loader.state()))
    finally:
        loader.close()


def digests(batch):
    # Rows are shared out among ranks by cost; their numbers in the global batch stay.
    hashes = (hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in batch["patches"])
    return zip(batch["slots"].tolist(), hashes, strict=True)


def test_a_run_continues_with_the_same_patches_on_two_ranks_with_two_workers(make_job, path, catalog):
    job = make_job(ImageText(path=path), **SETTINGS, global_batch_size=4, steps=6)
    whole, _ = fingerprints(job, catalog, 6)
    first, position = fingerprints(job, catalog, 3)
    two_workers = attrs.evolve(job, data=attrs.evolve(job.data, workers=2))
    progress = Progress(step=3, samples=position)
    ranks = run_on_ranks(2, lambda _: fingerprints(two_workers, catalog, 3, progress)[0])
    rest = [one | other for one, other in zip(*ranks, strict=True)]
    assert [*first, *rest] == whole
    assert {len(step) for step in whole} == {4}
    assert len({row for step in whole for row in step.values()}) > 4
