"""Images in tiles that are one image to the encoder: canvases are those of transformers, and rows have them whole."""

from __future__ import annotations

import json
import re

import attrs
import numpy as np
import pytest
from PIL import Image

from forge_core import Trainer
from forge_core.cli import main
from forge_plugin_cross_attention import CrossAttention
from forge_plugin_images import ImageText, RenderedText
from forge_plugin_images.prompts import prompts_with_images
from forge_plugin_images.resize import CanvasResize, NativeResize, TilesResize
from forge_plugin_images.tiling import canvas_of, fitted_size
from forge_plugin_text import Bytes
from forge_plugin_vision import IMAGE, LinearAdapter, PixelShuffle, TiledViT, VisionPart
from forge_testing import job_problems
from forge_testing.images import tiny_model

TOWER = TiledViT(
    dim=16, layers=1, global_layers=1, heads=2, patch=4, tile=8, arrangements=((1, 1), (1, 2), (2, 1)), intermediate=()
)
"""Tiles of 2 x 2 patches."""
MODEL = attrs.evolve(
    tiny_model(),
    vision=VisionPart(encoder=TOWER, adapter=LinearAdapter(), images_per_sequence=2),
    fusion=CrossAttention(every=1, sees="together", heads=4),
)


@pytest.fixture
def path(tmp_path):
    """Images that take one tile beside another, one, and one below another, with texts."""
    lines = []
    for number, (height, width) in enumerate([(8, 15), (7, 8), (30, 9)]):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        lines.append({"image": f"{number}.png", "text": "abc"[: number + 1]})
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(tmp_path / "pairs.jsonl")


def test_canvases_are_those_of_mllama():
    from transformers.models.mllama import image_processing_pil_mllama as reference

    generator, different = np.random.default_rng(0), set()
    for _ in range(1000):
        height, width = np.exp(generator.uniform(0, 8, 2)).astype(int).tolist()
        most, tile = int(generator.integers(1, 10)), int(generator.integers(4, 600))
        pairs = reference.get_all_supported_aspect_ratios(most)
        canvas = reference.get_optimal_tiled_canvas(height, width, most, tile)
        chosen = canvas_of((height, width), tile, pairs)
        own = chosen[0] * tile, chosen[1] * tile
        assert own == tuple(canvas), (height, width, most, tile)
        fitted = reference.get_image_size_fit_to_canvas(height, width, *canvas, tile)
        assert fitted_size((height, width), own, tile) == tuple(fitted), (height, width, own, tile)
        different.add(chosen)
    assert len(different) > 15


def test_a_row_has_one_image_of_all_tiles(build, path):
    data = build(ImageText(path=path), model=MODEL)
    rows = [data[number] for number in range(3)]
    assert [row["grids"].tolist() for row in rows] == [[[1, *sides], [0, 0, 0]] for sides in ([2, 4], [2, 2], [4, 2])]
    assert [list(row["input_ids"][:3]) for row in rows[:2]] == [[IMAGE, ord("a"), 256], [IMAGE, ord("a"), ord("b")]]
    # The canvas is black at the right, where the image does not reach.
    pixels = rows[0]["patches"][:8].reshape(2, 4, 3, 4, 4).transpose(0, 3, 1, 4, 2).reshape(8, 16, 3)
    with Image.open(path.replace("pairs.jsonl", "0.png")) as image:
        assert (pixels[:, :15] == np.asarray(image)).all()
    assert not pixels[:, 15].any()


def test_a_model_learns_from_canvases_and_generates(make_job, catalog, path, tmp_path):
    job = make_job(ImageText(path=path, resize=CanvasResize()), model=MODEL, global_batch_size=3, steps=2)
    folder = str(Trainer(job, catalog=catalog).run().folder)
    assert main(["generate", folder, "--image", f"{tmp_path}/0.png", "--prompt", "x", "--max-tokens", "2"]) == 0
    prompts = prompts_with_images(["x<image>"], [f"{tmp_path}/2.png"], job, Bytes().build(None, list))
    assert prompts.entries["grids"][0, 0].tolist() == [1, 4, 2]


@pytest.mark.parametrize(
    ("source", "model", "message"),
    [
        (
            ImageText(path="", resize=TilesResize()),
            MODEL,
            "resize: 'tiles', but the encoder takes images in tiles; take 'can",
        ),
        (ImageText(path="", resize=NativeResize()), MODEL, "resize: 'native', but the encoder takes images in tiles"),
        (
            ImageText(path="", resize=CanvasResize()),
            tiny_model(),
            "resize: 'canvas' is for encoders of images in tiles; take",
        ),
        (RenderedText(size=(16, 16)), MODEL, r"size: \[16, 16\], but the encoder takes images in tiles, of one of"),
        (
            ImageText(path=""),
            attrs.evolve(MODEL, vision=attrs.evolve(MODEL.vision, adapter=PixelShuffle())),
            "adapter: it joins 2 x 2 features of a grid, which this encoder's are not",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_job(make_job, path, source, model, message):
    source = attrs.evolve(source, path=path) if isinstance(source, ImageText) else source
    found = "\n".join(job_problems(make_job(source, model=model)))
    assert re.search(message, found), found
