"""Prompts with images, and `forge-run generate --image`."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest
import tomli_w
from PIL import Image

from forge_core import ForgeError, Trainer, dump_job
from forge_core.cli import main
from forge_core.config.load import MODEL_TABLES, parse_job
from forge_plugin_images import ImageText, RenderedText
from forge_plugin_images.prompts import prompts_with_images
from forge_plugin_images.resize import TilesResize
from forge_plugin_images.video import VideoText
from forge_plugin_text import Bytes
from forge_testing.images import tiny_model
from forge_testing.refusals import at, lacks, naming, refuses_all


@pytest.fixture
def files(tmp_path):
    """Two images of 8 x 48 pixels: black, and white."""
    paths = [str(tmp_path / name) for name in ("black.png", "white.png")]
    for path, grey in zip(paths, (0, 255), strict=True):
        Image.fromarray(np.full((8, 48, 3), grey, np.uint8)).save(path)
    return paths


@pytest.fixture
def job(make_job):
    words = RenderedText(held_out=2, length=(3, 3), text_size=(5, 5))
    return make_job(words, model=tiny_model(images_per_sequence=2), seq_len=24, steps=1)


@pytest.fixture
def tokenizer():
    return Bytes().build(None, list)


def test_images_stand_where_the_prompts_say(job, tokenizer, files):
    prompts = prompts_with_images(["a<image>b<image>", "c", "<image>"], [*files, files[0]], job, tokenizer)
    image = [-1] * 6
    assert prompts.ids == [[ord("a"), *image, ord("b"), *image], [ord("c")], image]
    assert prompts.entries["grids"].tolist() == [[[1, 1, 6]] * 2, [[0, 0, 0]] * 2, [[1, 1, 6], [0, 0, 0]]]
    assert prompts.entries["grid_seconds"].tolist() == [[0, 0]] * 3
    greys = prompts.entries["patches"].float().mean(-1).tolist()
    assert greys == [[0] * 6 + [255] * 6, [0] * 12, [0] * 12]


def test_one_prompt_without_a_mark_follows_its_images(job, tokenizer, files):
    assert prompts_with_images(["ab"], files, job, tokenizer).ids == [[-1] * 12 + [ord("a"), ord("b")]]


def test_what_does_not_fit_is_refused(job, tokenizer, files):
    with pytest.raises(ForgeError, match=naming("<image> 1", "2 images")):
        prompts_with_images(["<image>", "b"], files, job, tokenizer)
    with pytest.raises(ForgeError, match=naming("3 images", "18 patches", "2 images", "12 patches")):
        prompts_with_images(["a"], [*files, files[0]], job, tokenizer)
    with pytest.raises(ForgeError, match=naming("'nowhere.png'")):
        prompts_with_images(["a"], ["nowhere.png"], job, tokenizer)


def test_a_source_that_is_not_installed_may_say_how_images_are_resized(job, tokenizer, files, catalog):
    """So its plugin is named where there are images, and not missed elsewhere."""
    table = tomllib.loads(dump_job(job, catalog))
    table["data"]["sources"] = [{"type": "forge-plugin-nowhere/pictures"}]
    read = parse_job(tomli_w.dumps(table), "job.toml", catalog, MODEL_TABLES)
    with refuses_all(
        at("data.sources.0.type", "forge-plugin-nowhere"),
        at("data.sources.0", "pip install forge-plugin-nowhere"),
    ):
        prompts_with_images(["a"], files, read, tokenizer)


def test_images_are_resized_as_by_the_first_source_that_has_images(make_job, tokenizer, files, tmp_path):
    clips, pictures = VideoText(path=str(tmp_path)), ImageText(path=str(tmp_path), resize=TilesResize(max_tiles=2))
    model = tiny_model(8, 16, images_per_sequence=3)
    job = make_job(clips, data={"sources": (clips, pictures)}, model=model)
    prompts = prompts_with_images(["a"], files[:1], job, tokenizer)
    assert prompts.entries["grids"].tolist() == [[[1, 1, 2]] * 3]


def test_generate_takes_images(job, catalog, files, capsys):
    folder = str(Trainer(job, catalog=catalog).run().folder)
    capsys.readouterr()
    said = []
    for image in files:
        assert main(["generate", folder, "--image", image, "--prompt", "x", "--max-tokens", "4"]) == 0
        said.append(capsys.readouterr().out)
    assert all(text.startswith("x") for text in said)
    assert main(["generate", folder, "--image", "nowhere.png"]) != 0
    assert not lacks(capsys.readouterr().err, "'nowhere.png'")


def test_prompts_begin_as_documents_do(job, tokenizer, files):
    tokenizer.begin_of_text = [7, 8]
    image = [-1] * 6
    begun = prompts_with_images(["<image>a", "<image>"], files, job, tokenizer)
    assert begun.ids == [[7, 8, *image, ord("a")], [7, 8, *image]]
    assert prompts_with_images(["", "<image><image>"], files, job, tokenizer, bos=False).ids == [[256], image * 2]
