"""Splitting as in Idefics3: sizes, pixels and texts are those of its processor; keys that cannot be are refused."""

from __future__ import annotations

import ast
import json
import math
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from PIL import Image

from forge_core.contracts.errors import ForgeError
from forge_plugin_cross_attention import CrossAttention
from forge_plugin_images import ImageText
from forge_plugin_images.processing import ImageProcessor
from forge_plugin_images.prompts import prompts_with_images
from forge_plugin_images.resize import (
    BudgetResize,
    LongestResize,
    NativeResize,
    SplitResize,
    StretchResize,
    TopLeftResize,
)
from forge_plugin_images.resize.any_size import BudgetResizer, TopLeftResizer, size_in_budget, size_within
from forge_plugin_images.resize.tiles import AspectResizer, CanvasTilesResize, CanvasTilesResizer, SplitResizer
from forge_plugin_images.splitting import most_tiles, nearest_shape, split_grid, stretched_tiles
from forge_plugin_images.tile_text import TileText
from forge_plugin_images.tiling import fitted_size
from forge_plugin_text import Bytes
from forge_plugin_transformer import GroupedQueryAttention
from forge_plugin_vision import IMAGE, ImageFormat, MultimodalRope, Perceiver
from forge_testing import job_problems
from forge_testing.images import tiny_model
from forge_testing.refusals import at, check_problems, naming, problems_of

TILE = 16
MODEL = tiny_model(16, 16, images_per_sequence=5)
"""Images of four positions."""
TEXTS = TileText(before="<", tile="{row}.{column}", row_end="/", overview="=", single="!", after=">")


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


@pytest.fixture
def reference() -> Any:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    return Idefics3ImageProcessorPil(
        max_image_size={"longest_edge": TILE}, size={"longest_edge": 50}, image_mean=[0.0] * 3, image_std=[1.0] * 3
    )


def test_the_grid_is_idefics3s_choice(reference):
    """By what it makes of images: its own `get_number_of_image_patches` counts other columns for some sizes."""
    generator, different = np.random.default_rng(0), set()
    for _ in range(150):
        size = tuple(np.exp(generator.uniform(0, 5, 2)).astype(int).tolist())
        longest = int(generator.integers(8, 100))
        made = reference(Image.new("RGB", size[::-1]), size={"longest_edge": longest}, return_row_col_info=True)
        grid = split_grid(size, (TILE, TILE), longest)
        assert (max(made["rows"][0][0], 1), max(made["cols"][0][0], 1)) == grid, (size, longest)
        assert grid[0] * grid[1] <= most_tiles((TILE, TILE), longest)
        different.add(grid)
    assert len(different) > 20


@pytest.mark.parametrize("size", [(40, 70), (100, 33), (64, 64), (3, 200), (15, 15)])
@pytest.mark.parametrize("is_cut", [True, False])
def test_tiles_and_the_overview_are_those_of_idefics3(reference, size, is_cut):
    form = ImageFormat(patch=8, grid=(2, 2), resample="lanczos")
    processor = ImageProcessor(SplitResizer(form, "last", longest_side=50, is_cut=is_cut))
    image = noise(*size)
    patches = processor.patches(image)
    expected = reference(image, do_image_splitting=is_cut, return_tensors="np")["pixel_values"][0]
    tiles = np.round(expected * 255).astype(np.uint8).reshape(-1, 3, 2, 8, 2, 8)
    assert len(processor.grids(size)) == len(tiles)
    assert len(tiles) == 1 or is_cut
    assert np.array_equal(patches, tiles.transpose(0, 2, 4, 1, 3, 5).reshape(len(patches), -1))


@pytest.fixture
def internvl() -> Any:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    sides = {"height": TILE, "width": TILE}
    return GotOcr2ImageProcessorPil(size=sides, image_mean=[0.0] * 3, image_std=[1.0] * 3, crop_to_patches=True)


def test_the_nearest_shape_is_internvls_choice(internvl):
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    generator, different = np.random.default_rng(0), set()
    for _ in range(500):
        size = tuple(np.exp(generator.uniform(0, 6, 2)).astype(int).tolist())
        most = int(generator.integers(1, 14))
        columns, rows = get_optimal_tiled_canvas(size, (TILE, TILE), 1, most)
        assert nearest_shape(size, (TILE, TILE), most) == (rows, columns), (size, most)
        different.add((rows, columns))
    assert len(different) > 20


@pytest.mark.parametrize("size", [(40, 70), (100, 33), (64, 64), (9, 9)])
def test_stretched_tiles_and_the_overview_are_those_of_internvl(internvl, size):
    form = ImageFormat(patch=8, grid=(2, 2))
    processor = ImageProcessor(AspectResizer(form, "last", max_tiles=6))
    image = noise(*size)
    expected = np.stack(internvl(image, max_patches=6)["pixel_values"])
    tiles = np.round(expected * 255).astype(np.uint8).reshape(-1, 3, 2, 8, 2, 8)
    patches = processor.patches(image)
    assert len(processor.grids(size)) == len(tiles)
    assert np.array_equal(patches, tiles.transpose(0, 2, 4, 1, 3, 5).reshape(len(patches), -1))


@pytest.fixture
def llama4() -> Any:
    """The functions of Llama 4's image processor, whose module needs torchvision, which they do not."""
    spec = find_spec("transformers.models.llama4.image_processing_llama4")
    assert spec is not None
    assert spec.origin is not None
    known = {"math": math, "torch": torch, "defaultdict": defaultdict, "SizeDict": Any}
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name != "pad_to_best_fit":
            node.decorator_list = []  # a cache
            exec(compile(ast.unparse(node), spec.origin, "exec"), known)
    return known


def test_the_canvas_of_tiles_and_the_size_on_it_are_llama4s_choice(llama4):
    generator, different = np.random.default_rng(0), set()
    form = ImageFormat(patch=8, grid=(2, 2))
    for _ in range(400):
        height, width = np.exp(generator.uniform(0, 6, 2)).astype(int).tolist()
        most = int(generator.integers(1, 17))
        sizes = torch.tensor(llama4["find_supported_resolutions"](most, SimpleNamespace(height=TILE, width=TILE)))
        target = [int(side) for side in llama4["get_best_fit"]((height, width), sizes)]
        grid = CanvasTilesResizer(form, "last", max_tiles=most).tiles((height, width))
        assert [side * TILE for side in grid] == target, (height, width, most)
        bounds = [min(max(own, TILE), side) for own, side in zip((height, width), target, strict=True)]
        inner = llama4["get_max_res_without_distortion"]((height, width), bounds)
        assert fitted_size((height, width), tuple(target), TILE) == tuple(max(side, 1) for side in inner)
        different.add(grid)
    assert len(different) > 20


@pytest.mark.parametrize("size", [(40, 70), (100, 33), (9, 12)])
def test_tiles_are_cut_from_a_canvas_and_the_overview_is_stretched(size):
    form = ImageFormat(patch=8, grid=(2, 2), resample="bilinear")
    resizer = CanvasTilesResizer(form, "last", max_tiles=6)
    (rows, columns), image = resizer.tiles(size), noise(*size)
    canvas = np.zeros((rows * TILE, columns * TILE, 3), np.uint8)
    height, width = fitted_size(size, canvas.shape[:2], TILE)
    canvas[:height, :width] = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
    tiles = canvas.reshape(rows, TILE, columns, TILE, 3).swapaxes(1, 2).reshape(-1, TILE, TILE, 3)
    whole = [np.asarray(image.resize((TILE, TILE), Image.Resampling.BILINEAR))] if rows * columns > 1 else []
    made = resizer.images(image)
    assert len(made) == len(resizer.grids(size))
    assert np.array_equal(np.stack([np.asarray(each) for each in made]), np.stack([*tiles, *whole]))


def test_sizes_in_a_budget_are_gemma4s():
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    generator, different = np.random.default_rng(0), set()
    for _ in range(400):
        height, width = np.exp(generator.uniform(0, 8, 2)).astype(int).tolist()
        patch, side = int(generator.integers(1, 20)), int(generator.integers(1, 5))
        windows = int(generator.integers(1, 300))
        own = size_in_budget((height, width), patch * side, windows * side**2 * patch**2)
        assert own == get_aspect_ratio_preserving_size(height, width, patch, windows * side**2, side)
        different.add(own)
    assert len(different) > 200
    form = ImageFormat(patch=4, multiple=2)
    assert BudgetResizer(form, 40).target((30, 10)) == (40, 8)


@pytest.fixture
def path(tmp_path):
    noise(16, 32).save(tmp_path / "0.png")
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"image": "0.png", "text": "abc"}))
    return str(tmp_path / "pairs.jsonl")


@pytest.mark.parametrize("overview", ["first", "last", "none"])
def test_texts_stand_around_tiles_in_rows_and_in_prompts_and_are_not_learned(path, build, make_job, overview):
    keys: dict[str, Any] = {"resize": SplitResize(longest_side=32, overview=overview), "tile_text": TEXTS}
    rows = build(ImageText(path=path, **keys), model=MODEL, seq_len=64)
    written = {"first": "<=####1.1####1.2####/>", "last": "<1.1####1.2####/=####>", "none": "<1.1####1.2####/>"}
    ids = rows[0]["input_ids"].tolist()
    text = "".join("#" if id_ == IMAGE else chr(id_) for id_ in ids if id_ < 256)
    assert text.startswith(written[overview] + "abc")
    assert [chr(id_) for id_ in rows[0]["labels"] if 0 <= id_ < 256] == ["a", "b", "c"]
    job = make_job(ImageText(path=path, **keys), model=MODEL, seq_len=64)
    tokenizer = Bytes().build(None, list)
    file = path.replace("pairs.jsonl", "0.png")
    [ids] = prompts_with_images(["What<image>?"], [file], job, tokenizer).ids
    assert "".join("#" if id_ == IMAGE else chr(id_) for id_ in ids) == f"What{written[overview]}?"


def test_neighbouring_texts_are_encoded_as_one():
    assert TEXTS.pieces((2, 1), "last") == ["<1.1", "/2.1", "/=", ">"]
    assert TileText(between="|", tile="{column}").pieces((1, 3), "none") == ["1", "|2", "|3", ""]
    assert TEXTS.pieces((2, 1), "first") == ["<=", "1.1", "/2.1", "/>"]
    assert TEXTS.pieces((1, 1), "last") == ["<!", ">"]
    assert TileText(tile="{row}{other}").pieces((1, 2), "none") == ["1{other}", "1{other}", ""]


def test_a_prompt_with_too_many_tiles_is_refused(path, make_job):
    job = make_job(ImageText(path=path, resize=SplitResize(longest_side=64, overview="last")), model=MODEL)
    with pytest.raises(ForgeError, match=naming("1 images", "9 tiles", "36 patches", "5 images", "20 patches")):
        prompts_with_images(["What?"], [path.replace("pairs.jsonl", "0.png")], job, Bytes().build(None, list))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"cut": False, "overview": "last"}, "overview: 'last', but with cut = false no image has one; leave it out"),
        (
            {"longest_side": 64},
            "longest_side: a square image of 64 pixels becomes 16 tiles and an overview, which need",
        ),
    ],
)
def test_keys_that_cannot_be_are_refused(path, make_job, keys, problem):
    job = make_job(ImageText(path=path, resize=SplitResize(**keys)), model=MODEL)
    assert any(problem in each for each in job_problems(job))
    fitting = ImageText(path=path, resize=SplitResize(longest_side=32))
    assert not job_problems(make_job(fitting, model=MODEL))


def test_a_fusion_that_sees_one_image_at_a_time_is_refused(path, make_job):
    model = attrs.evolve(MODEL, fusion=CrossAttention(sees="last"))
    job = make_job(ImageText(path=path, resize=SplitResize(longest_side=32)), model=model)
    resize = at("data.sources.0.resize", "'split'", 'model.fusion.sees = "last"', '"together"', '"all"')
    check_problems(problems_of(job), resize, at("model.fusion.every", 4, 1))


def test_what_a_row_needs_is_known_without_decoding(tmp_path):
    form = ImageFormat(patch=8, grid=(2, 2), resample="lanczos")
    processor = ImageProcessor(SplitResizer(form, "last", longest_side=50))
    for size in ((37, 80), (80, 37), (50, 50), (1, 99)):
        image = Image.new("RGB", (size[1], size[0]))
        assert sum(grid.patches for grid in processor.grids(size)) == len(processor.patches(image))


def test_tiles_need_not_be_squares() -> None:
    pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    tiles = stretched_tiles(Image.fromarray(pixels), (2, 2), (2, 3), Image.Resampling.NEAREST)
    expected = [pixels[top : top + 2, left : left + 3] for top in (0, 2) for left in (0, 3)]
    assert [np.asarray(tile).tolist() for tile in tiles] == [tile.tolist() for tile in expected]


ANY_SIZE = tiny_model(any_size=True, images_per_sequence=2, patches_per_sequence=200)
BREAKS = TileText(before="<", feature_row="/", after=">")


def test_sides_within_the_longest_are_pixtrals() -> None:
    from transformers.image_utils import ChannelDimension
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    generator, different = np.random.default_rng(0), set()
    for _ in range(300):
        size = tuple(np.exp(generator.uniform(0, 7, 2)).astype(int).tolist())
        longest, step = int(generator.integers(8, 900)), int(generator.integers(1, 40))
        expected = get_resize_output_image_size(np.zeros((*size, 3)), longest, step, ChannelDimension.LAST)
        own = size_within(size, step, longest)
        assert own == tuple(max(side, step) for side in expected), (size, longest, step)  # theirs may be empty
        different.add(own)
    assert len(different) > 200


@pytest.fixture
def navit_resize() -> Any:
    """The function of Kimi-K2.5's image processor, whose module needs torchvision, which it does not."""
    spec = find_spec("transformers.models.kimi_k25.image_processing_kimi_k25")
    assert spec is not None
    assert spec.origin is not None
    known: dict[str, Any] = {"math": math}
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == "navit_resize":
            exec(compile(ast.unparse(node), spec.origin, "exec"), known)
    return known["navit_resize"]


def test_sizes_at_the_top_left_are_kimis(navit_resize):
    generator, different = np.random.default_rng(0), set()
    for _ in range(400):
        size = tuple(np.exp(generator.uniform(0, 8, 2)).astype(int).tolist())
        patch, multiple = int(generator.integers(1, 20)), int(generator.integers(1, 5))
        most, side = int(generator.integers(1, 3000)), multiple * int(generator.integers(1, 60))
        resizer = TopLeftResizer(ImageFormat(patch=patch, multiple=multiple), most, side)
        expected = navit_resize(*size, patch, multiple, most, side)
        assert (resizer.inner(size), resizer.target(size)) == expected, (size, patch, multiple, most, side)
        different.add(expected)
    assert len(different) > 200


def test_an_image_at_the_top_left_has_black_beside_it_alone():
    resizer = TopLeftResizer(ImageFormat(patch=4, multiple=2), 1000, 100)
    for size in ((13, 20), (16, 8)):
        made = np.asarray(resizer.fitted(noise(*size)))
        assert made.shape == (16, -(-size[1] // 8) * 8, 3)
        assert np.array_equal(made[: size[0], : size[1]], np.asarray(noise(*size)))
        assert not made[size[0] :].any()
        assert not made[:, size[1] :].any()


def test_rows_of_features_have_texts_between_that_are_not_learned(path, build, make_job):
    keys: dict[str, Any] = {"resize": LongestResize(longest_side=30), "tile_text": BREAKS}
    rows = build(ImageText(path=path, **keys), model=ANY_SIZE, seq_len=64)
    side = ANY_SIZE.image_input().format
    [_, down, across] = rows[0]["grids"][0].tolist()
    assert (down, across) == (-(-15 // side.patch), -(-30 // side.patch))
    written = "<" + "/".join("#" * across for _ in range(down)) + ">"
    ids = rows[0]["input_ids"].tolist()
    assert "".join("#" if id_ == IMAGE else chr(id_) for id_ in ids if id_ < 256).startswith(written + "abc")
    assert [chr(id_) for id_ in rows[0]["labels"] if 0 <= id_ < 256] == ["a", "b", "c"]
    job = make_job(ImageText(path=path, **keys), model=ANY_SIZE, seq_len=64)
    assert not job_problems(job)
    file = path.replace("pairs.jsonl", "0.png")
    prompts = prompts_with_images(["a<image>b<image>"], [file, file], job, Bytes().build(None, list))
    assert "".join("#" if id_ == IMAGE else chr(id_) for id_ in prompts.ids[0]) == f"a{written}b{written}"


@pytest.mark.parametrize(
    ("resize", "model", "expected"),
    [
        (LongestResize(longest_side=500), ANY_SIZE, at("longest_side", "a square image of 500 pixels", 200)),
        (LongestResize(longest_side=5000), ANY_SIZE, at("longest_side", "a square image of 5000 pixels", 200)),
        (LongestResize(), MODEL, at("", "'longest'", "16 x 16 pixels", "'stretch'")),
        (TopLeftResize(), MODEL, at("", "'top_left'", "16 x 16 pixels", "'stretch'")),
        (TopLeftResize(max_patches=201), ANY_SIZE, at("max_patches", 201, "patches_per_sequence = 200")),
        (BudgetResize(), MODEL, at("", "'budget'", "16 x 16 pixels", "'stretch'")),
        (BudgetResize(max_patches=201), ANY_SIZE, at("max_patches", 201, "patches_per_sequence = 200")),
        (CanvasTilesResize(max_tiles=1), MODEL, at("max_tiles", 1, "at least 2")),
        (CanvasTilesResize(), ANY_SIZE, at("", "'canvas_tiles'", "any size", "'native'")),
        (CanvasTilesResize(), tiny_model(16, 8, images_per_sequence=5), at("", "'canvas_tiles'", "squares")),
        (StretchResize(), ANY_SIZE, at("", "'stretch'", "any size", "'native'")),
        (NativeResize(max_patches=201), ANY_SIZE, at("max_patches", 201, "model.vision.patches_per_sequence = 200")),
        (NativeResize(max_patches=8, min_patches=9), ANY_SIZE, at("min_patches", 9, "max_patches", 8)),
        (NativeResize(min_patches=101), ANY_SIZE, at("min_patches", 101, 100)),
    ],
)
def test_types_that_an_encoder_or_a_sequence_does_not_suit_are_refused(path, make_job, resize, model, expected):
    job = make_job(ImageText(path=path, resize=resize), model=model)
    table = "data.sources.0.resize"
    check_problems(problems_of(job), attrs.evolve(expected, path=".".join(filter(None, (table, expected.path)))))


def test_texts_between_rows_need_rows_of_features(path, make_job):
    source = ImageText(path=path, tile_text=BREAKS)
    perceiver = attrs.evolve(MODEL.vision, adapter=Perceiver(latents=4, heads=2, layers=1))
    feature_row = at("data.sources.0.tile_text.feature_row", "'/'", "rows of features")
    for model in (attrs.evolve(MODEL, vision=perceiver), attrs.evolve(MODEL, fusion=CrossAttention(every=1))):
        check_problems(problems_of(make_job(source, model=model)), feature_row)
    rope = MultimodalRope(sections=(2, 1, 1))
    attention = GroupedQueryAttention(heads=2, head_dim=8, rope=rope)
    language = attrs.evolve(ANY_SIZE.language, attention=attention)
    problems = problems_of(make_job(source, model=attrs.evolve(ANY_SIZE, language=language)))
    check_problems(problems, at("model.language.attention.rope", "data.sources.0", "'/'", "tile_text.feature_row"))
