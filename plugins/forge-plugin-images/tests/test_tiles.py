"""Tiles: grids and patches are those of transformers, and all of an image's tiles are in its row."""

from __future__ import annotations

import json
import re
from pathlib import Path

import attrs
import numpy as np
import pytest
from PIL import Image

from forge_core import Trainer
from forge_core.contracts.errors import ForgeError
from forge_plugin_cross_attention import CrossAttention
from forge_plugin_images import ImageChat, ImageText, Interleaved
from forge_plugin_images.processing import ImageProcessor
from forge_plugin_images.prompts import prompts_with_images
from forge_plugin_images.resize import TilesResize
from forge_plugin_images.resize.one_size import StretchResizer
from forge_plugin_images.resize.tiles import TilesResizer
from forge_plugin_images.tiling import tile_grid, tile_grids
from forge_plugin_text import Bytes
from forge_plugin_text.packing import BestFit
from forge_plugin_vision import IMAGE, Grid, ImageFormat
from forge_testing import job_problems
from forge_testing.images import tiny_model
from forge_testing.refusals import naming, refuses

MODEL = tiny_model(8, 16, images_per_sequence=5)
"""Images of two patches; a row has room for five."""
FORM = ImageFormat(patch=8, grid=(4, 4))


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


@pytest.fixture
def path(tmp_path):
    """Images that take 2 x 2 tiles, one tile and 2 x 1 tiles, with texts."""
    lines = []
    for number, (height, width) in enumerate([(16, 32), (8, 16), (16, 15)]):
        noise(height, width, number).save(tmp_path / f"{number}.png")
        lines.append({"image": f"{number}.png", "text": "abc"[: number + 1]})
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(tmp_path / "pairs.jsonl")


def tiles_of_row(row) -> int:
    return int((row["grids"].prod(-1) > 0).sum())


# --- grids and pixels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [(336, 336), (24, 56)])
def test_the_grid_is_llava_nexts_choice_among_those_of_mllama(tile):
    from transformers.image_processing_utils import select_best_resolution
    from transformers.models.mllama.image_processing_pil_mllama import get_all_supported_aspect_ratios

    generator, different = np.random.default_rng(0), set()
    for _ in range(1000):
        size = tuple(np.exp(generator.uniform(0, 8, 2)).astype(int).tolist())
        most = int(generator.integers(1, 17))
        grids = [(rows, columns) for columns, rows in get_all_supported_aspect_ratios(most)]
        assert list(tile_grids(most)) == grids
        best = select_best_resolution(size, [(rows * tile[0], columns * tile[1]) for rows, columns in grids])
        grid = tile_grid(size, tile, most)
        assert (grid[0] * tile[0], grid[1] * tile[1]) == best, (size, most)
        different.add(grid)
    assert len(different) > 20


@pytest.mark.parametrize("size", [(40, 70), (100, 33), (64, 64), (15, 200), (65, 63)])
def test_tiles_and_the_overview_are_those_of_llava_next(size):
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    mean, std = [0.0] * 3, [1.0] * 3
    pinpoints = [[32 * rows, 32 * columns] for rows, columns in tile_grids(6) if rows * columns > 1]
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    reference = LlavaNextImageProcessorPil(
        image_grid_pinpoints=pinpoints, image_mean=mean, image_std=std, resample=3, **sizes
    )
    expected = np.asarray(reference(noise(*size))["pixel_values"][0]) * 255
    ours = ImageProcessor(TilesResizer(FORM, max_tiles=6))
    patches = ours.patches(noise(*size))
    assert len(ours.grids(size)) == len(expected) > 2
    assert len(patches) == sum(grid.patches for grid in ours.grids(size))
    whole = patches.reshape(-1, 4, 4, 3, 8, 8).transpose(0, 3, 1, 4, 2, 5).reshape(-1, 3, 32, 32)
    assert np.abs(whole - expected).max() < 1e-4


@pytest.mark.parametrize(("images", "patches"), [(5, 10), (5, 99), (9, 11)])
def test_without_a_bound_an_image_has_the_tiles_that_a_row_has_room_for_beside_the_overview(images, patches):
    seen = tiny_model(8, 16, images_per_sequence=images, patches_per_sequence=patches).image_input()
    assert TilesResize().most(seen) == 4
    assert TilesResize(overview="none").most(seen) == 5


def test_the_overview_may_come_last_or_not_at_all_and_is_left_out_beside_a_single_tile():
    def cut(overview, height=64, width=32):
        processor = ImageProcessor(TilesResizer(FORM, overview, max_tiles=4))
        assert set(processor.grids((height, width))) == {Grid(1, 4, 4)}
        return processor.patches(noise(height, width)).reshape(-1, 16, 192)

    tiles = cut("none")
    whole = ImageProcessor(StretchResizer(FORM)).patches(noise(64, 32))
    assert len(tiles) == 2
    assert (cut("first") == [whole, *tiles]).all()
    assert (cut("last") == [*tiles, whole]).all()
    assert len(cut("first", 30, 20)) == 1


# --- rows ------------------------------------------------------------------------------------------------------------


def test_a_row_has_all_tiles_of_its_image_as_images_of_their_own(build, path):
    data = build(ImageText(path=path, resize=TilesResize()), model=MODEL)
    assert [tiles_of_row(data[row]) for row in range(3)] == [5, 1, 3]
    assert [data.cost(row) for row in range(3)] == [10, 2, 6]
    row = data[0]
    assert row["grids"].tolist() == [[1, 1, 2]] * 5
    assert list(row["input_ids"][:11]) == [IMAGE] * 10 + [*b"a"]
    assert list(row["labels"][:12]) == [-100] * 9 + [*b"a", 256, -100]
    pixels = np.asarray(noise(16, 32, 0))
    tile = row["patches"][8:10].reshape(2, 3, 8, 8).transpose(2, 0, 3, 1).reshape(8, 16, 3)
    assert (tile == pixels[8:, 16:]).all()  # the last is the one at the bottom and right


def test_documents_of_tiles_are_packed_by_the_index_alone(build, path, monkeypatch):
    keys = {"model": tiny_model(8, 16, images_per_sequence=6), "data": {"packing": BestFit()}}
    build(ImageText(path=path, resize=TilesResize()), **keys)
    monkeypatch.setattr("forge_plugin_images.decoding.ImageDecoder.size", lambda *_: pytest.fail("measured again"))
    data = build(ImageText(path=path, resize=TilesResize()), **keys)
    assert sorted(data.cost(row) for row in range(len(data))) == [6, 12]
    monkeypatch.undo()
    assert sorted(tiles_of_row(data[row]) for row in range(len(data))) == [3, 6]


def test_other_tiles_are_another_index(build, path):
    def costs(**keys):
        data = build(ImageText(path=path, resize=TilesResize(**keys)), model=MODEL)
        return [data.cost(row) for row in range(3)]

    assert costs() == [10, 2, 6]
    # In two tiles, the first image would be no larger than in one.
    assert costs(max_tiles=2) == [2, 2, 6]
    assert costs(overview="none") == [8, 2, 4]


def test_no_document_is_cut_within_the_tiles_of_an_image(build, path, tmp_path):
    (tmp_path / "two.jsonl").write_text(json.dumps({"content": "a<image>b<image>c", "images": ["2.png", "2.png"]}))
    dataset = Interleaved(path=f"{tmp_path}/two.jsonl", resize=TilesResize(max_tiles=4), too_long="cut")
    data = build(dataset, model=MODEL)
    assert tiles_of_row(data[0]) == 3
    assert list(data[0]["input_ids"][:7]) == [*b"a", *[IMAGE] * 6]
    assert list(data[0]["labels"][6:8]) == [*b"b", -100]  # nothing of the second image


def test_a_chat_has_all_tiles_where_its_template_writes_the_image(build, path, tmp_path, tokenizer):
    message = {"role": "user", "content": "<image>?"}
    record = {"messages": [message, {"role": "assistant", "content": "red"}], "images": ["2.png"]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(record))
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    chats = ImageChat(path=f"{tmp_path}/chats.jsonl", resize=TilesResize())
    row = build(chats, model=MODEL, seq_len=40, data={"tokenizer": tokenizer(template)})[0]
    assert (row["input_ids"][:6] == IMAGE).all()
    assert tiles_of_row(row) == 3
    assert (row["input_ids"][6:] >= 0).all()


def test_a_prompt_has_the_tiles_that_its_images_had_in_training(make_job, path, tmp_path):
    job = make_job(ImageText(path=path, resize=TilesResize()), model=MODEL)
    tokenizer = Bytes().build(None, list)
    prompts = prompts_with_images(["x<image>", "<image>y"], [f"{tmp_path}/{n}.png" for n in (0, 2)], job, tokenizer)
    assert prompts.ids == [[ord("x"), *[IMAGE] * 10], [*[IMAGE] * 6, ord("y")]]
    assert (prompts.entries["grids"].prod(-1) > 0).sum(1).tolist() == [5, 3]
    with pytest.raises(ForgeError, match=naming("2 images", "8 tiles", "16 patches", "5 images", "10 patches")):
        prompts_with_images(["<image><image>"], [f"{tmp_path}/{n}.png" for n in (0, 2)], job, tokenizer)


def test_a_model_learns_from_tiles_and_generates(make_job, catalog, path, tmp_path):
    from forge_core.cli import main

    job = make_job(ImageText(path=path, resize=TilesResize()), model=MODEL, global_batch_size=3, steps=2)
    folder = str(Trainer(job, catalog=catalog).run().folder)
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    assert [line["vision/patches_per_sequence"] for line in lines] == [6.0, 6.0]
    assert main(["generate", folder, "--image", f"{tmp_path}/0.png", "--prompt", "x", "--max-tokens", "2"]) == 0


# --- cross-attention -------------------------------------------------------------------------------------------------


def test_with_cross_attention_a_text_sees_all_tiles_of_its_image(build, path):
    import torch

    from forge_plugin_cross_attention.modules.sight import visible_images

    fusion = CrossAttention(every=1, sees="together", heads=4)
    row = build(ImageText(path=path, resize=TilesResize()), model=attrs.evolve(MODEL, fusion=fusion))[0]
    assert list(row["input_ids"][:6]) == [IMAGE] * 5 + [*b"a"]
    visible = visible_images(torch.from_numpy(row["input_ids"])[None], None, "together")
    assert visible[0, 5].tolist() == [0, 5]


# --- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "model", "message"),
    [
        ({"max_tiles": 5}, MODEL, r"max_tiles: an image may become 5 tiles and an overview, which need model.vision."
         "images_per_sequence = 6, and it is 5; raise it, or lower max_tiles"),
        ({"max_tiles": 1}, MODEL, "max_tiles: 1, and an image needs at least 2; take 2 or more, or leave it out"),
        ({}, tiny_model(8, 16, images_per_sequence=2), "max_tiles: 1, and a sequence has room for no more; raise"),
        ({"max_tiles": 4}, tiny_model(8, 16, images_per_sequence=5, patches_per_sequence=8),
         "need model.vision.patches_per_sequence = 10, and it is 8"),
        ({}, tiny_model(any_size=True, patches_per_sequence=40), "resize: 'tiles', but the encoder takes images of"),
        ({}, attrs.evolve(MODEL, fusion=CrossAttention(every=1, heads=4)),
         "resize: 'tiles' makes several images of one, and with model.fusion.sees = \"last\" a position sees the last "
         'of them only; set it to "together" or "all"'),
    ],
)  # fmt: skip
def test_tiles_that_cannot_be_are_refused_with_the_job(make_job, path, keys, model, message):
    found = "\n".join(job_problems(make_job(ImageText(path=path, resize=TilesResize(**keys)), model=model)))
    assert re.search(message, found), found


def test_an_image_in_more_tiles_than_a_row_has_room_for_beside_another_is_named(build, path, tmp_path):
    (tmp_path / "two.jsonl").write_text(json.dumps({"content": "<image><image>", "images": ["0.png", "2.png"]}))
    with refuses(
        "data.sources.0.too_long", "two.jsonl:1", "16 patches", "8 images", 10, 5, "model.vision.images_per_sequence"
    ):
        build(Interleaved(path=f"{tmp_path}/two.jsonl", resize=TilesResize()), model=MODEL)
