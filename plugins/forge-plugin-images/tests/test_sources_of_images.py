"""Tar shards, loose files, Parquet and `save_to_disk` have the rows of JSON lines."""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from forge_plugin_images import ImageText, Interleaved
from forge_testing import job_problems
from forge_testing.images import tiny_model
from forge_testing.refusals import refuses

MODEL = tiny_model(8, 16, images_per_sequence=2)
COUNT = 8


def image(number: int) -> bytes:
    data = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (8, 16, 3), np.uint8)
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


def text(number: int) -> str:
    return f"image {number}"


def write_lines(folder: Path) -> str:
    for number in range(COUNT):
        (folder / f"{number}.png").write_bytes(image(number))
    lines = [json.dumps({"image": f"{number}.png", "text": text(number)}) for number in range(COUNT)]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return str(folder)  # the images beside the file of lines are what it refers to


def write_files(folder: Path) -> str:
    for number in range(COUNT):
        (folder / f"my.photo {number}.PNG").write_bytes(image(number))
        (folder / f"my.photo {number}.txt").write_text(text(number) + "\n")
    (folder / "README.txt").write_text("no image")
    return str(folder)


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def write_shards(folder: Path) -> str:
    for shard in range(2):
        with tarfile.open(folder / f"shard-{shard}.tar", "w") as archive:
            for number in range(shard * 4, shard * 4 + 4):
                add(archive, f"a/{number:06}.png", image(number))
                add(archive, f"a/{number:06}.txt", text(number).encode())
    return f"{folder}/shard-*.tar"


def write_shards_with_json(folder: Path) -> str:
    with tarfile.open(folder / "shard.tar", "w") as archive:
        for number in range(COUNT):
            add(archive, f"{number}.json", json.dumps({"text": text(number)}).encode())
            add(archive, f"{number}.png", image(number))
    return str(folder / "shard.tar")


def table():
    import datasets

    rows = {
        "image": [{"bytes": image(number), "path": None} for number in range(COUNT)],
        "text": [text(number) for number in range(COUNT)],
    }
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    return datasets.Dataset.from_dict(rows, features=features)


def write_parquet(folder: Path) -> str:
    table().to_parquet(str(folder / "part.parquet"))
    return str(folder)


def write_saved(folder: Path) -> str:
    table().save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


SOURCES = [write_files, write_shards, write_shards_with_json, write_parquet, write_saved]


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path_factory):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    datasets.disable_progress_bars()


@pytest.mark.parametrize("write", SOURCES, ids=lambda write: write.__name__.removeprefix("write_"))
def test_all_sources_have_the_same_rows_which_a_worker_reads_too(build, tmp_path, write):
    folders = tmp_path / "lines", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
    expected = build(ImageText(path=write_lines(folders[0])), model=MODEL)
    data = build(ImageText(path=write(folders[1]), held_out_every=4), model=MODEL)
    assert (len(expected), len(data), len(data.held_out)) == (COUNT, 6, 2)
    copy = pickle.loads(pickle.dumps(data))
    for number, row in enumerate([1, 2, 3, 5, 6, 7]):
        for name, entry in expected[row].items():
            assert (data[number][name] == entry).all()
            assert (copy[number][name] == entry).all()
    assert data.bytes_per_token == expected.bytes_per_token
    names = {data.where(number) for number in range(6)}
    assert len(names) == 6


def test_a_place_names_shard_and_group_and_holds_it_out(build, tmp_path):
    pattern = write_shards(tmp_path)
    data = build(ImageText(path=pattern), model=MODEL)
    assert data.where(5) == f"{tmp_path}/shard-1.tar:a/000005"
    (tmp_path / "held.txt").write_text(data.where(5))
    assert build(ImageText(path=pattern, held_out_list=f"{tmp_path}/held.txt"), model=MODEL).held_out.where(
        0
    ) == data.where(5)


def test_a_document_of_a_shard_names_its_images_by_their_endings(build, tmp_path):
    with tarfile.open(tmp_path / "documents.tar", "w") as archive:
        add(archive, "7.json", json.dumps({"content": "a<image>b<image>", "images": ["1.png", "7.0.png"]}).encode())
        for number in range(2):
            add(archive, f"7.{number}.png", image(number))
    row = build(Interleaved(path=str(tmp_path / "documents.tar")), model=MODEL)[0]
    first = np.asarray(Image.open(io.BytesIO(image(1))))
    assert (row["patches"][0].reshape(3, 8, 8).transpose(1, 2, 0) == first[:, :8]).all()
    assert list(row["input_ids"][:6]) == [*b"a", -1, -1, *b"b", -1, -1]


@pytest.mark.parametrize("endings", [("txt", "json"), ("json", "txt")], ids=" before ".join)
def test_a_file_of_a_group_counts_before_a_key_of_its_json(tmp_path, endings):
    members = {"txt": b"of the file", "json": b'{"text": "of the JSON", "image": "elsewhere.png", "width": 8}'}
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        for ending in endings:
            add(archive, f"0.{ending}", members[ending])
        add(archive, "0.png", image(0))
    values = ImageText(path=str(tmp_path / "shard.tar")).records()[0].values
    assert (values["text"], values["image"], values["width"]) == ("of the file", "png", 8)


def test_a_file_of_a_group_is_named_by_the_longest_ending(tmp_path):
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        add(archive, "0.png", image(0))
        add(archive, "0.seg.png", image(1))
    records = ImageText(path=str(tmp_path / "shard.tar")).records()
    for name in ("seg.png", "0.seg.png"):
        assert records.image(records[0], name).open().read() == image(1)


def test_what_a_group_lacks_is_named(build, tmp_path):
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        add(archive, "0.png", image(0))
    with refuses("data.sources.0", ":0", "'text'", "'png'", "'image'", "`text`"):
        build(ImageText(path=str(tmp_path / "shard.tar")), model=MODEL)
    records = ImageText(path=str(tmp_path / "shard.tar")).records()
    with refuses("", ":0", "'jpg'", "'png'"):
        records.image(records[0], "jpg")


def test_a_damaged_member_is_named(build, tmp_path):
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        add(archive, "0.png", image(0)[:20])
        add(archive, "0.txt", b"text")
    with refuses("data.sources.0.unreadable", f"{tmp_path}/shard.tar:0.png", "1 of 1"):
        build(ImageText(path=str(tmp_path / "shard.tar")), model=MODEL)


def test_a_text_that_is_not_utf_8_is_named(build, tmp_path):
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        add(archive, "0.png", image(0))
        add(archive, "0.txt", "Käse".encode("latin-1"))
    with refuses("data.sources.0", f"{tmp_path}/shard.tar:0.txt", "byte 1", "UTF-8"):
        build(ImageText(path=str(tmp_path / "shard.tar")), model=MODEL)


def test_tables_need_another_plugin(build, tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "forge_plugin_huggingface.source", None)
    with refuses("data.sources.0.path", "pip install forge-plugin-huggingface"):
        build(ImageText(path=str(tmp_path / "a.parquet")), model=MODEL)


@pytest.mark.parametrize(
    ("files", "keys", "message"),
    [
        (["a.jsonl", "b.tar"], {}, r"has files of several formats \(.jsonl, .tar\); name files of one format"),
        (["a.csv"], {}, "none of 1 files of .* is of a known format"),
        ([], {}, "has no data"),
        (["a.jsonl"], {"split": "test"}, "split: 'test', but only tables have splits"),
    ],
)
def test_files_that_cannot_be_a_source_are_refused_with_the_job(make_job, tmp_path, files, keys, message):
    (tmp_path / "data").mkdir()
    for file in files:
        (tmp_path / "data" / file).write_text("{}")
    job = make_job(ImageText(path=str(tmp_path / "data"), **keys))
    found = "\n".join(job_problems(job))
    assert re.search(message, found), found


def test_a_compressed_shard_is_refused(build, tmp_path):
    with tarfile.open(tmp_path / "shard.tar", "w:gz") as archive:
        add(archive, "0.png", image(0))
    with refuses("data.sources.0.path", "shard.tar'", "gzip"):
        build(ImageText(path=str(tmp_path / "shard.tar")), model=MODEL)


@pytest.mark.parametrize("write", [write_lines, write_files, write_shards])
def test_ranks_other_than_the_first_look_at_no_file_unless_their_cache_is_empty(
    write, build, cache, tmp_path, monkeypatch
) -> None:
    """On a file system of a network each look at a file is a message to one server."""
    dataset = ImageText(path=write(tmp_path))
    sent = []

    def on_rank0(context, describe):
        sent.append(describe())
        return sent[0]

    monkeypatch.setattr("forge_plugin_images.file_dataset.from_rank0", on_rank0)
    identity = build(dataset, model=MODEL).identity()
    [found] = sent
    monkeypatch.setattr("forge_plugin_images.file_dataset.from_rank0", lambda context, describe: found)
    with monkeypatch.context() as patched:
        for name in ("source_files.files_of", "groups.files_of", "records.stamps"):
            patched.setattr(f"forge_plugin_images.{name}", lambda *arguments: pytest.fail("it looks at files"))
        assert build(dataset, model=MODEL).identity() == identity
    shutil.rmtree(cache)  # as on another machine
    assert build(dataset, model=MODEL).identity() == identity
