"""Streams of images: the rows of the data read whole, continued from any row on any number of ranks and workers."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import tarfile
import zipfile
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from PIL import Image

from forge_core import Trainer
from forge_core.checkpoint.state import Progress
from forge_core.contracts.data import Stream
from forge_core.contracts.errors import DataError
from forge_core.data.loader import TrainLoader
from forge_core.engine.build import build_context, build_datasets, build_tokenizer
from forge_plugin_images import ImageChatStream, ImageText, ImageTextStream, InterleavedStream
from forge_plugin_images.resize import TilesResize
from forge_plugin_text import Bytes
from forge_plugin_text.packing import BestFit, Isolate
from forge_plugin_vision import IMAGE
from forge_testing import job_problems
from forge_testing.images import tiny_model
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, lacks, naming, problems_of, refuses
from forge_testing.suites import DatasetSuite

MODEL = tiny_model(8, 16, images_per_sequence=3)
FILES = (7, 4, 5)
"""Rows of each file."""
COUNT = sum(FILES)


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path_factory):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    datasets.disable_progress_bars()


def image(number: int) -> bytes:
    data = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (8, 16, 3), np.uint8)
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


def text(number: int) -> str:
    return f"image {number}"[: 4 + number % 5]


def damaged(number: int, headless: tuple[int, ...], cut: tuple[int, ...]) -> bytes:
    return b"no image" if number in headless else image(number)[:150] if number in cut else image(number)


def write_parquet(folder: Path, headless: tuple[int, ...] = (), cut: tuple[int, ...] = ()) -> dict[str, Any]:
    import datasets

    features, start = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")}), 0
    for file, rows in enumerate(FILES):
        numbers = range(start, start + rows)
        images = [{"bytes": damaged(number, headless, cut), "path": None} for number in numbers]
        columns = {"image": images, "text": list(map(text, numbers))}
        datasets.Dataset.from_dict(columns, features=features).to_parquet(f"{folder}/part-{file}.parquet", batch_size=2)
        start += rows
    return {"path": "parquet", "data_files": f"{folder}/*.parquet"}


def write_shards(folder: Path) -> dict[str, Any]:
    start = 0
    for file, rows in enumerate(FILES):
        with tarfile.open(folder / f"shard-{file}.tar", "w") as archive:
            for number in range(start, start + rows):
                for ending, data in (("png", image(number)), ("txt", text(number).encode())):
                    member = tarfile.TarInfo(f"{number:04}.{ending}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        start += rows
    return {"path": "webdataset", "data_files": f"{folder}/*.tar", "image": "png", "text": "txt"}


def write_folder(folder: Path) -> dict[str, Any]:
    for number in range(COUNT):
        (folder / f"{number:02}.png").write_bytes(image(number))
    lines = [json.dumps({"file_name": f"{number:02}.png", "text": text(number)}) for number in range(COUNT)]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return {"path": str(folder)}


def write_saved(folder: Path) -> dict[str, Any]:
    import datasets

    rows = {"image": [{"bytes": image(n), "path": None} for n in range(COUNT)], "text": list(map(text, range(COUNT)))}
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(folder / "saved"))
    return {"path": str(folder / "saved")}


def number_of(row) -> int:
    """The number of the image of a row of one document."""
    return PATCHES_OF[row["patches"][:2].tobytes()]


def patches(number: int) -> bytes:
    pixels = np.asarray(Image.open(io.BytesIO(image(number))))
    return pixels.reshape(8, 2, 8, 3).transpose(1, 3, 0, 2).tobytes()


PATCHES_OF = {patches(number): number for number in range(COUNT)}


def epoch_of(stream, lane: int) -> list[dict[str, np.ndarray]]:
    """The rows of a lane's first epoch: those that begin in it."""
    found, before = [], 0
    for row, position in stream.read(lane, None):
        if before:
            return found
        found.append(row)
        before = position["epoch"]
    raise AssertionError("a lane has no end")


def through_json(position: Any) -> Any:
    return json.loads(json.dumps(position))


class TestStreamedImageText(DatasetSuite):
    has_images = True
    job = {"model": MODEL, "seq_len": 24, "global_batch_size": 2, "data": {"tokenizer": Bytes()}}

    def make(self, folder):
        folder.mkdir(exist_ok=True)
        keys = {"lanes": 2, "held_out_every": 4, "held_out_documents": 3}
        return ImageTextStream(**write_parquet(folder), **keys)


# --- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [write_parquet, write_shards, write_folder, write_saved])
def test_lanes_have_the_rows_of_the_data_read_whole_each_once(build, tmp_path, write):
    (tmp_path / "streamed").mkdir()
    (tmp_path / "whole").mkdir()
    write_parquet(tmp_path / "whole")
    whole = build(ImageText(path=str(tmp_path / "whole")), model=MODEL)
    stream = build(ImageTextStream(lanes=2, **write(tmp_path / "streamed")), model=MODEL)
    assert isinstance(stream, Stream)
    copy = pickle.loads(pickle.dumps(stream))
    rows = [row for lane in range(2) for row in epoch_of(copy, lane)]
    assert sorted(map(number_of, rows)) == list(range(COUNT))
    for row in rows:
        for name, entry in whole[number_of(row)].items():
            assert (row[name] == entry).all()
            assert (row[name].dtype, row[name].shape) == (entry.dtype, entry.shape)


def test_streamed_images_are_tiled_too(build, tmp_path):
    keys, model = write_parquet(tmp_path), tiny_model(8, 8, images_per_sequence=3)
    whole = build(ImageText(path=str(tmp_path), resize=TilesResize()), model=model, seq_len=30)
    stream = build(ImageTextStream(**keys, lanes=1, resize=TilesResize()), model=model, seq_len=30)
    rows = epoch_of(stream, 0)
    assert [int((row["grids"].prod(-1) > 0).sum()) for row in rows] == [3] * COUNT
    assert all((row[name] == whole[number][name]).all() for number, row in enumerate(rows) for name in row)


def test_a_file_in_an_archive_is_an_image_too(build, tmp_path):
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        archive.writestr("3.png", image(3))
    record = {"image": f"zip://3.png::{tmp_path}/images.zip", "text": "a"}
    (tmp_path / "records.jsonl").write_text(json.dumps(record))
    keys = {"path": "json", "data_files": f"{tmp_path}/records.jsonl", "lanes": 1}
    assert number_of(next(build(ImageTextStream(**keys), model=MODEL).read(0, None))[0]) == 3


def test_documents_and_chats_are_streamed_too(build, tmp_path, tokenizer):
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(image(number))
    keys = {"path": str(tmp_path), "data_files": "records.jsonl", "lanes": 1}
    document = {"content": "ab<image>c<image>", "images": ["1.png", "0.png"]}
    (tmp_path / "records.jsonl").write_text(json.dumps(document))
    row, _ = next(build(InterleavedStream(**keys), model=MODEL).read(0, None))
    assert list(row["input_ids"][:7]) == [*b"ab", IMAGE, IMAGE, *b"c", IMAGE, IMAGE]
    assert row["patches"][:4].tobytes() == patches(1) + patches(0)
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    chat = {"messages": [{"role": "assistant", "content": "<image>red"}], "images": ["1.png"]}
    (tmp_path / "records.jsonl").write_text(json.dumps(chat))
    row, _ = next(build(ImageChatStream(**keys), model=MODEL, data={"tokenizer": tokenizer(template)}).read(0, None))
    assert list(row["input_ids"][:2]) == [IMAGE, IMAGE]
    assert number_of(row) == 1


def test_a_tokenizer_is_trained_on_what_is_not_held_out(tmp_path):
    keys = {**write_parquet(tmp_path), "held_out_every": 3, "held_out_documents": 2}
    starts = (0, 7, 11)
    expected = [text(start + row) for start, rows in zip(starts, FILES, strict=True) for row in range(rows) if row % 3]
    assert list(ImageTextStream(**keys).documents()) == expected


def test_with_isolate_a_row_has_the_documents_that_follow_each_other_while_they_fit(build, tmp_path):
    stream = build(ImageTextStream(**write_parquet(tmp_path), lanes=1), **packed(seq_len=24))
    rows = epoch_of(stream, 0)
    images = [
        bytes(row["patches"][at : at + 2].tobytes()) for row in rows for at in (0, 2, 4) if row["patches"][at].any()
    ]
    assert [PATCHES_OF[one] for one in images][:COUNT] == list(range(COUNT))
    assert {int((row["grids"].prod(-1) > 0).sum()) for row in rows} == {2, 3}
    for row in rows:
        assert (row["positions"][np.flatnonzero(np.diff(row["document_ids"])) + 1] == 0).all()


def packed(**settings: Any) -> dict[str, Any]:
    return {"model": MODEL, "data": {"packing": Isolate()}, **settings}


# --- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [0, 4])
@pytest.mark.parametrize("isolate", [False, True])
def test_a_lane_continues_at_any_row_and_counts_each_broken_document_once(build, tmp_path, shuffle, isolate):
    keys = write_parquet(tmp_path, headless=(1, 2, 9), cut=(4,))
    data = ImageTextStream(**keys, lanes=2, shuffle=shuffle, unreadable="skip", max_unreadable=0.5)
    stream = build(data, **(packed(seq_len=24) if isolate else {"model": MODEL}))
    for lane in range(2):
        rows = list(islice(stream.read(lane, None), 14))
        assert sum(int(row["broken_documents"]) for row, _ in rows) > 2
        for start in range(0, 12, 3):
            continued = stream.read(lane, through_json(rows[start][1]))
            for (expected, place), (row, found) in zip(rows[start + 1 :], continued, strict=False):
                assert found == place
                assert all((row[name] == expected[name]).all() for name in expected)


def rows_read(job, catalog, steps, progress=None):
    """SHA-256 of the patches of this rank's rows, step by step, and the position after them."""
    context = build_context(job, catalog, None)
    context = attrs.evolve(context, tokenizer=build_tokenizer(job, context))
    loader = TrainLoader(job, build_datasets(job, context), context, progress)
    try:
        read = [[digest(row) for batch in loader.next_step() for row in batch["patches"]] for _ in range(steps)]
        return read, through_json(loader.state())
    finally:
        loader.close()


def digest(row) -> str:
    return hashlib.sha256(row.numpy().tobytes()).hexdigest()


def test_a_run_continues_with_the_same_rows_on_two_ranks_with_two_workers(make_job, tmp_path, catalog):
    keys = write_parquet(tmp_path, headless=(1,), cut=(9,))
    data = ImageTextStream(**keys, lanes=4, shuffle=3, unreadable="skip", max_unreadable=0.5)
    job = make_job(data, **packed(seq_len=24), global_batch_size=4, steps=6)
    whole, _ = rows_read(job, catalog, 6)
    first, position = rows_read(job, catalog, 3)
    two_workers = attrs.evolve(job, data=attrs.evolve(job.data, workers=2))
    progress = Progress(step=3, samples=position)
    ranks = run_on_ranks(2, lambda _: rows_read(two_workers, catalog, 3, progress)[0])
    assert [*first, *([*one, *other] for one, other in zip(*ranks, strict=True))] == whole
    assert len({row for step in whole for row in step}) > 8


def test_a_job_trains_on_a_stream_and_continues(make_job, tmp_path, catalog):
    keys = write_parquet(tmp_path, headless=(2,))
    data = ImageTextStream(
        **keys, lanes=2, unreadable="skip", max_unreadable=0.5, held_out_every=4, held_out_documents=3
    )
    job = make_job(data, model=MODEL, global_batch_size=4, steps=6)
    losses = logged(Trainer(job, catalog=catalog).run().folder)
    short = attrs.evolve(job, job=attrs.evolve(job.job, name="short"), train=attrs.evolve(job.train, steps=3))
    folder = Trainer(short, catalog=catalog).run().folder
    longer = attrs.evolve(short, train=attrs.evolve(short.train, steps=6))
    Trainer(longer, catalog=catalog, resume_with_changes=True).run()
    assert logged(folder) == losses
    assert sum(broken for _, broken in losses) >= 1


def logged(folder: Path) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["data/unreadable"]) for line in lines if "loss" in line]


# --- held out, and what cannot be -------------------------------------------------------------------------------------


def test_held_out_documents_are_kept_and_not_trained_on(build, tmp_path):
    keys = {**write_parquet(tmp_path), "lanes": 1}
    stream = build(ImageTextStream(**keys, held_out_every=3, held_out_documents=4), model=MODEL)
    held = [number_of(stream.held_out[row]) for row in range(len(stream.held_out))]
    assert held == [0, 3, 6, 7]
    assert stream.held_out.where(3) == "row 0 of file 1 of 'parquet', split 'train'"
    assert not {*map(number_of, epoch_of(stream, 0))} & {0, 3, 6, 7, 10, 11, 14}
    assert stream.bytes_per_token == pytest.approx(
        sum(map(len, map(text, held))) / (sum(map(len, map(text, held))) + 4)
    )
    splits = {"train": f"{tmp_path}/part-0.parquet", "test": f"{tmp_path}/part-1.parquet"}
    stream = build(ImageTextStream(**{**keys, "data_files": splits}, held_out_split="test"), model=MODEL)
    assert [number_of(stream.held_out[row]) for row in range(len(stream.held_out))] == [7, 8, 9, 10]
    assert sorted(map(number_of, epoch_of(stream, 0))) == list(range(7))


def test_a_broken_image_is_named_by_file_and_row_and_fatal_unless_skipped(build, tmp_path):
    keys = {"lanes": 1, **write_parquet(tmp_path, headless=(8,), cut=(9,))}
    place = "row {} of file 1 of 'parquet', split 'train'"
    with pytest.raises(DataError, match=naming(place.format(1), 'unreadable = "skip"')):
        list(islice(build(ImageTextStream(**keys), model=MODEL).read(0, None), 12))
    stream = build(ImageTextStream(**keys, unreadable="skip", max_unreadable=0.0), model=MODEL)
    with pytest.raises(DataError, match=naming(place.format(1), "1 of 9", "max_unreadable = 0.0")):
        list(islice(stream.read(0, None), 12))


def test_a_document_without_room_is_named_or_left_out(build, tmp_path, caplog):
    keys = {"lanes": 1, **write_parquet(tmp_path)}
    with refuses("", "row 3 of file 0", "9 positions", 8, '"cut"', '"skip"'):
        list(islice(build(ImageTextStream(**keys), model=MODEL, seq_len=8).read(0, None), 6))
    stream = build(ImageTextStream(**keys, too_long="skip"), model=MODEL, seq_len=8)
    assert sorted(map(number_of, epoch_of(stream, 0))) == [n for n in range(COUNT) if len(text(n)) <= 6]
    assert sum(not lacks(record.getMessage(), "9 positions") for record in caplog.records) == 1
    cut = build(ImageTextStream(**keys, too_long="cut"), model=MODEL, seq_len=8)
    assert sorted(map(number_of, epoch_of(cut, 0))) == list(range(COUNT))


def test_a_column_that_is_not_there_is_named(build, tmp_path):
    keys = {**write_shards(tmp_path)}
    with refuses("data.sources.0.text", "'webdataset'", "'train'", "'words'", "'png'", "'txt'"):
        build(ImageTextStream(**{**keys, "text": "words"}), model=MODEL)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data_files": ()}, "data_files: path = 'parquet' is a format; name the files that have it"),
        ({"path": "./nowhere"}, "path: './nowhere' does not exist"),
        ({"lanes": 3}, "lanes: 3 does not divide train.global_batch_size = 4"),
        ({"held_out_every": 5}, "held_out_documents: with held_out_every, a stream would be read to its end"),
        ({"held_out_documents": 5}, "held_out_documents: nothing is held out"),
        (
            {"held_out_split": "test", "held_out_every": 5, "held_out_documents": 5},
            "held_out_split: held_out_every = 5 is set as well; keep one of the two",
        ),
        ({"held_out_split": "train"}, "held_out_split: 'train' is the training split"),
    ],
)
def test_keys_are_checked_with_the_job(make_job, tmp_path, keys, message):
    found = "\n".join(job_problems(make_job(ImageTextStream(**{**write_parquet(tmp_path), **keys}))))
    assert re.search(message, found), found


def test_a_packing_that_needs_all_documents_is_refused(make_job, tmp_path):
    job = make_job(ImageTextStream(**write_parquet(tmp_path)), model=MODEL, data={"packing": BestFit()})
    check_problems(problems_of(job), at("data.sources.0", "[data.packing]", '"isolate"', "a dataset of files"))


def test_streams_need_another_plugin(make_job, tmp_path, monkeypatch):
    job = make_job(ImageTextStream(**write_parquet(tmp_path)), model=MODEL)
    monkeypatch.setattr("forge_plugin_images.stream_dataset.find_spec", lambda name: None)
    check_problems(problems_of(job), at("data.sources.0", "pip install forge-plugin-huggingface"))


def test_a_split_without_rows_holds_nothing_out(build, tmp_path):
    import datasets

    keys = write_parquet(tmp_path)
    none = datasets.Dataset.from_parquet(f"{tmp_path}/part-0.parquet", cache_dir=str(tmp_path / "cache")).select([])
    none.to_parquet(f"{tmp_path}/none.parquet")
    keys["data_files"] = {"train": f"{tmp_path}/part-0.parquet", "test": f"{tmp_path}/none.parquet"}
    with refuses("data.sources.0.held_out_split", "'test'"):
        build(ImageTextStream(**keys, lanes=1, held_out_split="test"), model=MODEL)
