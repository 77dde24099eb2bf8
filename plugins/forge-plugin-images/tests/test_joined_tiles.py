"""Images of any resolution: tiles, what is shown of them, and pixels are those of LLaVA-NeXT and LLaVA-OneVision."""

from __future__ import annotations

import json
import re
from pathlib import Path

import attrs
import numpy as np
import pytest
import tomli_w
import torch
from PIL import Image

from forge_core.cli import main
from forge_core.parallel.mesh import leave_group
from forge_plugin_images import ImageText, Interleaved
from forge_plugin_images.processing import ImageProcessor
from forge_plugin_images.prompts import prompts_with_images
from forge_plugin_images.resize import AnyResolutionResize, CanvasResize, StretchResize, TilesResize
from forge_plugin_images.resize.joined import AnyResolutionResizer
from forge_plugin_images.tiling import best_tiles, shown_part, tile_grids
from forge_plugin_text import Bytes
from forge_plugin_text.packing import BestFit
from forge_plugin_vision import IMAGE, AnyResolution, Grid, ImageFormat, MLPAdapter, VisionPart
from forge_testing import job_problems
from forge_testing.images import tiny_model
from forge_testing.refusals import lacks

PAIRS = ((1, 2), (2, 1), (2, 2), (1, 3), (3, 1))
PLAIN = tiny_model(16, 16)
MODEL = attrs.evolve(
    PLAIN,
    vision=VisionPart(
        encoder=PLAIN.vision.encoder,
        adapter=AnyResolution(arrangements=PAIRS, max_feature_tiles=2, hidden=8),
        images_per_sequence=3,
    ),
)
"""Tiles of 2 x 2 patches of 8 pixels."""
SIZES = [(16, 32), (30, 20), (64, 8), (33, 33), (40, 70), (100, 33)]
PIXELS = 35
"""Sides of tiles in pixels, of which 32 are seen."""
FORM = ImageFormat(patch=8, grid=(4, 4), pixels=(PIXELS, PIXELS), arrangements=PAIRS)
SETTINGS = {
    "image_grid_pinpoints": [[PIXELS * rows, PIXELS * columns] for rows, columns in PAIRS],
    "size": {"height": PIXELS, "width": PIXELS},
    "image_mean": [0.0, 0.2, 0.5],
    "image_std": [1.0] * 3,
}


def noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8))


@pytest.fixture
def path(tmp_path):
    """Texts with an image each, and one with two."""
    lines = []
    for number, size in enumerate(SIZES[:3]):
        noise(*size).save(tmp_path / f"{number}.png")
        lines.append({"content": "<image>abc", "images": [f"{number}.png"]})
    lines.append({"content": "<image>a<image>b", "images": ["0.png", "1.png"]})
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(tmp_path / "texts.jsonl")


def test_what_is_shown_of_tiles_is_what_llava_next_leaves_of_them():
    from transformers.image_processing_utils import select_best_resolution
    from transformers.models.llava_next.modeling_llava_next import unpad_image

    generator, shapes = np.random.default_rng(0), set()
    for _ in range(500):
        size = tuple(np.exp(generator.uniform(0, 8, 2)).astype(int).tolist())
        pairs = [tuple(map(int, pair)) for pair in generator.permutation([PAIRS, tile_grids(6)][generator.integers(2)])]
        side, pixels = int(generator.integers(1, 28)), int(generator.integers(8, 400))
        best = select_best_resolution(size, [(rows * pixels, columns * pixels) for rows, columns in pairs])
        if best is None:  # a line, of which nothing is shown
            continue
        rows, columns = best_tiles(size, (pixels, pixels), pairs)
        assert (rows * pixels, columns * pixels) == best
        shown = shown_part(size, rows * side, columns * side)
        assert shown == unpad_image(torch.empty(1, rows * side, columns * side), size).shape[1:]
        grid = Grid.of_tiles(rows, columns, shown)
        assert grid.plain == (1 + rows * columns, side, side)
        shapes.add((rows, columns, shown == (rows * side, columns * side)))
    assert len(shapes) > 15


@pytest.mark.parametrize("size", SIZES)
def test_the_pixels_of_an_image_are_those_of_the_published_processors(size):
    from transformers import LlavaNextImageProcessorPil, LlavaOnevisionImageProcessorPil

    processor = ImageProcessor(AnyResolutionResizer(FORM))
    [grid] = processor.grids(size)
    patches = processor.patches(noise(*size))
    crop = {"crop_size": {"height": PIXELS, "width": PIXELS}, "do_center_crop": True}
    for reference in (LlavaNextImageProcessorPil(**SETTINGS, **crop), LlavaOnevisionImageProcessorPil(**SETTINGS)):
        expected = patches_of(reference(noise(*size))["pixel_values"][0])
        assert len(patches) == grid.patches == len(expected) > 32
        assert np.abs(patches - expected).max() < 1e-4


def test_the_pixels_of_one_image_of_several_are_llava_onevisions():
    from transformers import LlavaOnevisionImageProcessorPil

    reference = LlavaOnevisionImageProcessorPil(**SETTINGS)
    form = attrs.evolve(FORM, mean=(0.0, 0.2, 0.5))
    processor = ImageProcessor(AnyResolutionResizer(form, 1))
    assert processor.among(1) is processor
    for size in SIZES:
        expected = patches_of(reference([[noise(*size), noise(8, 8)]])["pixel_values"][0])
        [grid] = processor.among(2).grids(size)
        assert grid == (1, 4, 4)
        assert np.abs(processor.among(2).patches(noise(*size)) - expected).max() < 1e-4


def patches_of(tiles: np.ndarray) -> np.ndarray:
    """(tiles, 3, 35, 35), normalised, to (patches, 3 * 8 * 8), as bytes."""
    pixels = (np.asarray(tiles) + np.array(SETTINGS["image_mean"]).reshape(3, 1, 1)) * 255
    return pixels[..., :32, :32].reshape(-1, 3, 4, 8, 4, 8).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 192)


# --- rows and prompts ------------------------------------------------------------------------------------------------


def test_rows_and_prompts_have_images_in_tiles_and_several_of_a_document_in_one(build, make_job, path, tmp_path):
    keys = {"model": MODEL, "seq_len": 60}
    data = build(Interleaved(path=path, resize=AnyResolutionResize(max_tiled_images=1)), **keys)
    first, second = Grid.of_tiles(1, 2, (2, 4)), Grid.of_tiles(2, 2, (4, 2))
    assert [data[row]["grids"][:2].tolist() for row in (0, 1, 3)] == [
        [[*first], [0, 0, 0]],
        [[*second], [0, 0, 0]],
        [[1, 2, 2], [1, 2, 2]],
    ]
    # The overview, and 2 x 4 features with a vector behind each row; or one tile and a vector.
    assert list(data[0]["input_ids"][:17]) == [IMAGE] * (4 + 2 * 5) + [*b"abc"]
    assert list(data[3]["input_ids"][:12]) == [*[IMAGE] * 5, *b"a", *[IMAGE] * 5, *b"b"]
    assert [data.cost(row) for row in range(4)] == [12, 20, 16, 8]
    assert build(Interleaved(path=path), **keys).cost(3) == 32
    packed = build(
        Interleaved(path=path, resize=AnyResolutionResize(max_tiled_images=1)), **keys, data={"packing": BestFit()}
    )
    assert sorted(packed.cost(row) for row in range(len(packed)))[-1] > 20

    job = make_job(Interleaved(path=path, resize=AnyResolutionResize(max_tiled_images=1)), **keys)
    files = [f"{tmp_path}/{number}.png" for number in (0, 0, 1)]
    prompts = prompts_with_images(["<image>x", "<image><image>"], files, job, Bytes().build(None, list))
    assert prompts.ids == [[IMAGE] * 14 + [ord("x")], [IMAGE] * 10]
    grids = prompts.entries["grids"].tolist()
    assert [grids[0][0], *grids[1][:2]] == [[*first], [1, 2, 2], [1, 2, 2]]


def test_a_job_is_planned_trains_and_generates(path, tmp_path):
    job = {
        "job": {"name": "joined", "output": str(tmp_path)},
        "train": {"steps": 2, "global_batch_size": 2, "seq_len": 60},
        "model": {
            "type": "vision_language",
            "language": {"vocab_size": 257, "dim": 16, "layers": 1, "attention": {"heads": 2}},
            "vision": {
                "images_per_sequence": 3,
                "encoder": {"type": "vit", "dim": 16, "layers": 1, "heads": 2, "patch": 8, "size": [16, 16]},
                "adapter": {"type": "any_resolution", "arrangements": [[*pair] for pair in PAIRS]},
            },
        },
        "data": {
            "tokenizer": {"type": "bytes"},
            "packing": {"type": "best_fit"},
            "sources": [
                {"type": "interleaved", "path": path, "resize": {"type": "any_resolution", "max_tiled_images": 1}}
            ],
        },
        "optimizer": {"type": "adamw"},
    }
    (tmp_path / "job.toml").write_text(tomli_w.dumps(job))
    leave_group()
    words = ["data", "picture", str(tmp_path / "job.toml"), "--sample", "0", "--out", str(tmp_path / "sample.html")]
    assert main(words) == 0
    assert not lacks((tmp_path / "sample.html").read_text(), "2 x 2 tiles", "16 x 16 pixels", "4 x 2 patches")
    assert main(["plan", str(tmp_path / "job.toml")]) == 0
    assert main([str(tmp_path / "job.toml")]) == 0
    lines = [json.loads(line) for line in Path(tmp_path, "joined/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    # 12 + 20 + 16 + 8 patches in two rows
    assert [line["vision/patches_per_sequence"] for line in lines if "loss" in line] == [28.0, 28.0]
    prompt = ["--image", f"{tmp_path}/2.png", "--prompt", "x", "--max-tokens", "2"]
    assert main(["generate", str(tmp_path / "joined"), *prompt]) == 0


# --- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "model", "message"),
    [
        ({"resize": TilesResize()}, MODEL, "'tiles' makes each tile an image, but the adapter joins an image's tiles"),
        ({"resize": CanvasResize()}, MODEL, "'canvas' is for encoders of images in tiles"),
        ({"resize": AnyResolutionResize()}, PLAIN, "'any_resolution' is for adapters that join an image's tiles; take"),
        ({}, attrs.evolve(tiny_model(8, 16), vision=attrs.evolve(tiny_model(8, 16).vision, adapter=AnyResolution())),
         "model.vision.adapter: it joins tiles, which are squares of the encoder's one size, and this encoder has "
         "images of 1 x 2 patches; take another encoder"),
        ({}, attrs.evolve(tiny_model(any_size=True), vision=VisionPart(
            encoder=tiny_model(any_size=True).vision.encoder, adapter=AnyResolution(), patches_per_sequence=8)),
         "this encoder has images of any size"),
        ({}, attrs.evolve(MODEL, vision=attrs.evolve(MODEL.vision, adapter=AnyResolution(arrangements=()))),
         "adapter.arrangements: it is a list of pairs, rows and columns of tiles, from 1 to 999; take mlp for"),
        ({}, attrs.evolve(MODEL, vision=attrs.evolve(MODEL.vision, adapter=AnyResolution(arrangements=((1, 2),) * 2))),
         "adapter.arrangements: a pair occurs twice"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_job(make_job, path, keys, model, message):
    found = "\n".join(job_problems(make_job(ImageText(**{"path": path, **keys}), model=model)))
    assert re.search(re.escape(message), found), found


def test_images_in_one_tile_may_have_any_policy_of_one_size(build, path):
    data = build(Interleaved(path=path, resize=StretchResize()), model=MODEL)
    assert data[3]["grids"].tolist() == [[1, 2, 2], [1, 2, 2], [0, 0, 0]]
    assert MLPAdapter().arrangements == ()
