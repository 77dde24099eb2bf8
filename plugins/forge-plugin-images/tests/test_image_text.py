"""Dataset `image_text`: captions of images in files, measured once, decoded when read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from PIL import Image

from forge_core import JobError
from forge_core.contracts.errors import DataError
from forge_plugin_images import ImageText
from forge_plugin_images.resize import NativeResize
from forge_plugin_text import Bytes
from forge_plugin_vision import IMAGE, PixelShuffle
from forge_testing import job_problems
from forge_testing.images import tiny_model
from forge_testing.refusals import at, check_problems, lacks, naming, problems_of, refuses
from forge_testing.suites import DatasetSuite

END = 256


def write_pairs(folder: Path, count: int = 12, **changes: Any) -> Path:
    """Images of one colour each, in a folder `images`, and a file that names them."""
    (folder / "images").mkdir(exist_ok=True)
    lines = []
    for number in range(count):
        Image.new("RGB", (48, 8), (20 * number, 100, 5 * number)).save(folder / "images" / f"{number}.png")
        lines.append({"image": f"images/{number}.png", "text": f"text {number}"[: 3 + number % 5]} | changes)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "pairs.jsonl"


class TestImageText(DatasetSuite):
    has_images = True
    job = {"model": tiny_model(8, 24), "seq_len": 12, "data": {"tokenizer": Bytes()}}

    def make(self, folder):
        folder.mkdir(exist_ok=True)
        return ImageText(path=str(write_pairs(folder, 16)), held_out_every=4)


def test_a_row_is_the_image_then_its_text_and_the_image_predicts_the_first_token(build, tmp_path):
    row = build(ImageText(path=str(write_pairs(tmp_path))))[4]
    text = b"text 4"
    assert list(row["input_ids"][: 6 + len(text)]) == [IMAGE] * 6 + [*text]
    assert list(row["labels"]) == [-100] * 5 + [*text, END] + [-100] * (24 - 5 - len(text) - 1)
    assert row["grids"].tolist() == [[1, 1, 6]]
    assert row["patches"].reshape(6, 3, 64)[:, :, 0].tolist() == [[80, 100, 20]] * 6


def test_the_text_may_stand_before_the_image_and_a_prompt_is_not_learned(build, tmp_path):
    path = str(write_pairs(tmp_path, prompt="who?"))
    before = build(ImageText(path=path, caption="before"))[4]
    assert list(before["input_ids"][:12]) == [*b"text 4"] + [IMAGE] * 6
    assert list(before["labels"][:12]) == [*b"ext 4"] + [-100] * 6 + [END]
    prompted = build(ImageText(path=path, prompt="prompt"))[4]
    assert list(prompted["input_ids"][:16]) == [IMAGE] * 6 + [*b"who?text 4"]
    assert list(prompted["labels"][:16]) == [-100] * 9 + [*b"text 4", END]


def test_several_images_of_a_record_follow_each_other(build, tmp_path):
    path = write_pairs(tmp_path, 3, image=["images/1.png", "images/2.png"])
    row = build(ImageText(path=str(path)), model=tiny_model(images_per_sequence=2))[0]
    assert (row["input_ids"][:12] == IMAGE).all()
    assert row["patches"][:, 0].tolist() == [20] * 6 + [40] * 6


def test_every_nth_document_and_listed_ones_are_held_out(build, tmp_path):
    path = write_pairs(tmp_path)
    every = build(ImageText(path=str(path), held_out_every=4))
    assert [every.held_out.where(row) for row in range(3)] == [f"{path}:{line}" for line in (1, 5, 9)]
    assert len(every) == 9
    (tmp_path / "held.txt").write_text(f"# two\n{path}:3\n{path}:4\n")
    listed = build(ImageText(path=str(path), held_out_list=str(tmp_path / "held.txt")))
    assert [listed.held_out.where(row) for row in range(2)] == [f"{path}:3", f"{path}:4"]
    assert listed.bytes_per_token == pytest.approx((5 + 6) / (6 + 7))
    (tmp_path / "held.txt").write_text("pairs.jsonl:3\n")
    with refuses("data.sources.0.held_out_list", 1, f"{tmp_path}/held.txt", f"{path}:1"):
        build(ImageText(path=str(path), held_out_list=str(tmp_path / "held.txt")))


def test_a_tokenizer_is_trained_on_what_is_not_held_out(tmp_path):
    path = write_pairs(tmp_path, 4)
    assert list(ImageText(path=str(path), held_out_every=2).documents()) == ["text", "text 3"]


def test_the_second_start_opens_no_image(build, tmp_path, monkeypatch):
    path = str(write_pairs(tmp_path))
    first = build(ImageText(path=path))
    monkeypatch.setattr("forge_plugin_images.decoding.ImageDecoder.size", lambda *_: pytest.fail("measured again"))
    assert build(ImageText(path=path)).identity() == first.identity()


# --- what cannot be -------------------------------------------------------------------------------------------------


def test_documents_without_room_are_counted_and_the_remedy_is_named(build, tmp_path):
    path = write_pairs(tmp_path)
    room = ("4 of 12", f"{path}:4", "12 positions", "train.seq_len", '"cut"', '"skip"')
    with refuses("data.sources.0.too_long", *room, 11):
        build(ImageText(path=str(path)), seq_len=11)


def test_too_long_documents_are_left_out_or_cut_but_never_within_an_image(build, tmp_path):
    path = str(write_pairs(tmp_path))
    skipped = build(ImageText(path=path, too_long="skip"), seq_len=11)
    assert len(skipped) == 8
    assert not lacks(skipped.describe(), 8, 4)
    cut = build(ImageText(path=path, too_long="cut"), seq_len=11)
    assert len(cut) == 12
    assert "4 cut" in cut.describe()
    assert list(cut[4]["labels"]) == [-100] * 5 + [*b"text 4"]
    with refuses("data.sources.0", "train.seq_len = 4"):  # no room for a whole image
        build(ImageText(path=path, too_long="cut"), seq_len=4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"picture": "0.png", "text": "a"}', r":2: no key 'image', but 'picture', 'text'; set `image` to the key"),
        ('{"image": "images/0.png", "text": 7}', ":2: 'text' holds '7', which is not a text"),
        ('{"image": 3, "text": "a"}', ":2: '3' is no image or video; give the path of a file, or its bytes"),
        ('{"image": "https://a.b/c.png", "text": "a"}', ":2: 'https://a.b/c.png' is on the network; download it"),
        (
            '{"image": "data:image/png;base64,@", "text": "a"}',
            ":2: the file in 'data:image/png;base64,@'… is not base64",
        ),
        ("[1]", r":2: '\[1\]' is not an object"),
        ("{", ":2: not JSON"),
    ],
)
def test_a_record_that_is_not_as_the_job_says_is_named(build, tmp_path, line, message):
    path = write_pairs(tmp_path)
    path.write_text("\n" + line + "\n" + path.read_text())
    with pytest.raises(JobError, match=message):
        build(ImageText(path=str(path)))


def test_broken_images_are_named_or_left_out_up_to_a_share(build, tmp_path):
    path = write_pairs(tmp_path)
    (tmp_path / "images" / "3.png").unlink()
    (tmp_path / "images" / "5.png").write_bytes(b"no image")
    with refuses(
        "data.sources.0.unreadable", "2 of 12", "pairs.jsonl:4", f"{tmp_path}/images/3.png", f"{tmp_path}/images/5.png"
    ):
        build(ImageText(path=str(path)))
    skipped = build(ImageText(path=str(path), unreadable="skip", max_unreadable=0.2))
    assert len(skipped) == 10
    assert not lacks(skipped.describe(), 10, 2)
    with pytest.raises(JobError, match=r"max_unreadable: 0.1, but 2 of 12 documents"):
        build(ImageText(path=str(path), unreadable="skip", max_unreadable=0.1))


def test_an_image_that_breaks_off_is_named_when_it_is_read_or_its_row_is_blank(build, tmp_path, caplog):
    path, image = write_pairs(tmp_path), tmp_path / "images" / "3.png"
    noise = np.random.default_rng(0).integers(0, 256, (8, 48, 3), np.uint8)
    Image.fromarray(noise).save(image)
    image.write_bytes(image.read_bytes()[:600])
    with pytest.raises(DataError, match=naming(f"{path}:4", f"{image}", 'unreadable = "skip"')):
        build(ImageText(path=str(path)))[3]
    skipped = build(ImageText(path=str(path), unreadable="skip", max_unreadable=0.1))
    row = skipped[3]
    assert (row["labels"] == -100).all()
    assert not row["patches"].any()
    assert not lacks(caplog.text, f"{path}:4")
    skipped[3]  # once more: it counts once
    with pytest.raises(DataError, match=naming("1 of 12", "max_unreadable = 0.01", f"{path}:4")):
        build(ImageText(path=str(path), unreadable="skip"))[3]


def test_an_image_that_was_exchanged_for_one_of_another_size_is_noticed(build, tmp_path):
    path = write_pairs(tmp_path, 2)
    data = build(ImageText(path=str(path)), model=tiny_model(any_size=True, patches_per_sequence=12))
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "1.png")
    with pytest.raises(DataError, match=naming(f"touch {path}", f"{path}:2")):
        data[1]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"path": "nowhere.jsonl"}, r"path: 'nowhere.jsonl' does not exist"),
        ({"resize": NativeResize()}, r"resize: 'native', but the encoder takes images of 8 x 48 pixels"),
        ({"held_out_list": "none.txt"}, "held_out_list: 'none.txt' does not exist"),
        ({"held_out_list": "none.txt", "held_out_every": 3}, "held_out_list: held_out_every = 3 is set as well"),
    ],
)
def test_keys_are_checked_with_the_job(make_job, tmp_path, keys, message):
    path = str(write_pairs(tmp_path))
    found = "\n".join(job_problems(make_job(ImageText(**{"path": path, **keys}))))
    assert re.search(message, found), found


def test_texts_without_a_tokenizer_are_refused(make_job, build, tmp_path):
    data = ImageText(path=str(write_pairs(tmp_path)))
    job = make_job(data)
    job = evolve(job, data=evolve(job.data, tokenizer=None))
    [problem] = job_problems(job)
    assert not lacks(problem, "data.sources.0", "[data.tokenizer]")
    context = SimpleNamespace(tokenizer=None)
    with refuses("", "[data.tokenizer]"):
        data.documents_of(context, data.records())


def test_a_model_that_sees_no_images_is_refused(make_job, tmp_path):
    job = make_job(ImageText(path=str(write_pairs(tmp_path))), model=tiny_model().language)
    check_problems(problems_of(job), at("data.sources.0", "Transformer", 'type = "vision_language"'))


@pytest.mark.parametrize(
    ("keys", "path", "facts"),
    [
        ({"max_patches": 3}, ".max_patches", (3, 4)),  # the adapter joins each square of four
        ({"max_patches": 13}, ".max_patches", (13, "model.vision.patches_per_sequence = 12")),
        ({"max_patches": 8, "min_patches": 9}, ".min_patches", (9, 8)),
    ],
)
def test_bounds_on_patches_are_checked_with_the_job(make_job, tmp_path, keys, path, facts):
    model = tiny_model(any_size=True, patches_per_sequence=12)
    model = evolve(model, vision=evolve(model.vision, adapter=PixelShuffle(factor=2)))
    [problem] = job_problems(
        make_job(ImageText(path=str(write_pairs(tmp_path)), resize=NativeResize(**keys)), model=model)
    )
    assert not lacks(problem, f"data.sources.0.resize{path}", *facts)
