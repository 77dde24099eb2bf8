"""Documents with images that cannot be read are counted exactly, whoever reads them."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import numpy as np
import pytest
from PIL import Image

from forge_core import Trainer
from forge_plugin_images import ImageText
from forge_plugin_parallel import ContextParallel
from forge_testing.documents import RandomDocuments
from forge_testing.images import tiny_model
from forge_testing.processes import run_on_ranks

COUNT, BROKEN = 8, (2, 5)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Captions of images, of which two break off after their header."""
    lines, generator = [], np.random.default_rng(0)
    for number in range(COUNT):
        image = tmp_path / f"{number}.png"
        Image.fromarray(generator.integers(0, 256, (8, 16, 3), np.uint8)).save(image)
        if number in BROKEN:
            image.write_bytes(image.read_bytes()[:150])
        lines.append(json.dumps({"image": image.name, "text": f"text {number}"}))
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    return f"{tmp_path}/pairs.jsonl"


@pytest.fixture
def counts(make_job, catalog, path, tmp_path):
    """(further settings) -> the metric of each step of an epoch, in which each document is read once."""

    def run(ranks: int = 1, workers: int = 0, **changes):
        images = ImageText(path=path, unreadable="skip", max_unreadable=0.5)
        model = tiny_model(8, 16)
        job = make_job(images, model=model, global_batch_size=4, steps=COUNT // 4, **changes)
        job = attrs.evolve(job, data=attrs.evolve(job.data, workers=workers))
        folder = run_on_ranks(ranks, lambda _: str(Trainer(job, catalog=catalog).run().folder))[0]
        return logged(Path(folder))

    return run


def logged(folder: Path) -> list[float]:
    """The metric of each step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["data/unreadable"] for line in lines if "loss" in line]


def test_the_count_of_a_step_is_that_of_its_global_batch(counts):
    alone = counts()
    assert sum(alone) == len(BROKEN)
    assert counts(ranks=2, workers=2) == alone
    assert counts(ranks=2, parallel={"cp": ContextParallel(degree=2, method="ulysses")}) == alone


def test_a_row_says_how_many_of_its_documents_are_left_out(build, path):
    data = build(ImageText(path=path, unreadable="skip", max_unreadable=0.5), model=tiny_model(8, 16))
    assert [int(data[row]["broken_documents"]) for row in range(COUNT)] == [0, 0, 1, 0, 0, 1, 0, 0]


def test_rows_of_text_beside_them_count_none(make_job, catalog, path):
    job = make_job(ImageText(path=path, unreadable="skip", max_unreadable=0.5), model=tiny_model(8, 16), steps=4)
    job = attrs.evolve(job, data=attrs.evolve(job.data, sources=(*job.data.sources, RandomDocuments(longest=20))))
    assert sum(logged(Trainer(job, catalog=catalog).run().folder)) == len(BROKEN)  # half of 16 rows are the images
