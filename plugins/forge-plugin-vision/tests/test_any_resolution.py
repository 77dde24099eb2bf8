"""Tiles that are joined: features, positions and numbers of patches are those of LLaVA-NeXT and LLaVA-OneVision."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.modeling_llava_next import LlavaNextModel, unpad_image
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

from forge_plugin_vision import AnyResolution, Grid, ImageFormat
from forge_plugin_vision.modules.images import Images

WIDTH, DIM, SIDE = 6, 5, 3
NEXT = AnyResolution()
ONEVISION = AnyResolution(
    arrangements=tuple((rows, columns) for rows in range(1, 5) for columns in range(1, 5)),
    max_feature_tiles=2,
    frame_pool=2,
)
SIZES = [
    (40, 100),
    (100, 40),
    (90, 95),
    (95, 90),
    (7, 200),
    (33, 33),
    (61, 64),
    (1000, 1010),
    (1010, 1000),
    (2, 900),
    (24, 56),
]
"""Heights and widths: squares in two tiles, one of which no row is shown, one that is nearly shrunk."""


def grid_of(keys: AnyResolution, size: tuple[int, int]) -> Grid:
    """The grid by the functions of `transformers`, for tiles of 3 x 3 patches of 8 pixels."""
    tile = 8 * SIDE
    height, width = select_best_resolution(size, [[tile * rows, tile * columns] for rows, columns in keys.arrangements])
    rows, columns = height // tile, width // tile
    shown = unpad_image(torch.empty(1, rows * SIDE, columns * SIDE), size).shape[1:]
    return Grid.of_tiles(rows, columns, tuple(shown))


def expected(keys: AnyResolution, module: Any, tiles: Tensor, size: tuple[int, int]) -> Tensor:
    """What `transformers` makes of the features (tiles, side^2, W) of an image."""
    tile = 8 * SIDE
    config = SimpleNamespace(
        image_grid_pinpoints=[[tile * rows, tile * columns] for rows, columns in keys.arrangements],
        vision_config=SimpleNamespace(image_size=tile, patch_size=8),
    )
    features = [module.projection(tiles, None)]
    if keys.max_feature_tiles:
        aspect = f"anyres_max_{keys.max_feature_tiles}"
        model = SimpleNamespace(config=config)
        packed, _ = LlavaOnevisionModel.pack_image_features(model, features, [size], module.newline, aspect)
    else:
        model = SimpleNamespace(config=config)
        packed, _ = LlavaNextModel.pack_image_features(model, features, [size], "full", module.newline)
    return packed[0]


def expected_of_video(keys: AnyResolution, module: Any, frames: Tensor) -> Tensor:
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(image_size=8 * SIDE, patch_size=8)))
    pooled = LlavaOnevisionModel.apply_pooling(model, module.projection(frames, None)) if keys.frame_pool == 2 else None
    pooled = module.projection(frames, None) if pooled is None else pooled
    return torch.cat([pooled.flatten(0, 1), module.newline[None]])


@pytest.fixture(params=[NEXT, ONEVISION], ids=["next", "onevision"])
def keys(request):
    return request.param


@pytest.fixture
def module(keys, context, randomised):
    return randomised(keys.build(context, width=WIDTH, dim=DIM))


def test_features_of_images_of_any_shape_in_one_row_are_those_of_transformers(keys, module):
    generator = torch.Generator().manual_seed(0)
    grids, features, wanted = [], [], []
    for number, size in enumerate(SIZES):
        grid = grid_of(keys, size)
        tiles = torch.randn(grid.plain.frames, SIDE**2, WIDTH, dtype=torch.float64, generator=generator)
        grids.append(grid), features.append(tiles.flatten(0, 1)), wanted.append(expected(keys, module, tiles, size))
        if number == 3:  # an image in one tile, none, and a video, between the others
            for frames in (1, 0, 4):
                one = torch.randn(frames, SIDE**2, WIDTH, dtype=torch.float64, generator=generator)
                grids.append(Grid(frames, SIDE, SIDE) if frames else Grid(0, 0, 0)), features.append(one.flatten(0, 1))
                if frames == 1:
                    wanted.append(torch.cat([module.projection(one, None)[0], module.newline[None]]))
                elif frames:
                    wanted.append(expected_of_video(keys, module, one))
    batch = torch.tensor([grids, [*reversed(grids)]])
    row = torch.cat(features), torch.cat(features[::-1])
    filled = torch.stack([torch.cat([each, torch.full((5, WIDTH), 99.0, dtype=torch.float64)]) for each in row])
    output = module(filled, Images.of(batch, filled.shape[1]))
    counts = keys.positions(Grid(*batch.unbind(-1)))
    assert counts.tolist() == [[keys.positions(grid) for grid in each] for each in (grids, grids[::-1])]
    assert [count for count in counts[0].tolist() if count] == [len(each) for each in wanted]
    for own, parts in zip(output, (wanted, wanted[::-1]), strict=True):
        together = torch.cat(parts)
        assert (own[: len(together)] - together).abs().max() < 1e-12
    assert output.isfinite().all()


def test_a_frame_of_a_single_pooled_feature_is_the_mean_of_its_patches(context, randomised):
    module = randomised(ONEVISION.build(context, width=WIDTH, dim=DIM))
    frames = torch.randn(3, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    output = module(frames.reshape(1, 12, WIDTH), Images.of(torch.tensor([[[3, 2, 2]]]), 12))
    expected = torch.cat([module.projection(frames, None).mean(1), module.newline[None]])
    assert (output[0, :4] - expected).abs().max() < 1e-12


def test_a_row_has_room_for_images_of_which_all_is_shown(module, keys):
    rows, columns = max(keys.arrangements, key=lambda tiles: tiles[0] / tiles[1])
    grid = Grid.of_tiles(rows, columns, (rows * SIDE, columns * SIDE))
    features = torch.zeros(1, 4 * grid.patches, WIDTH, dtype=torch.float64)
    output = module(features, Images.of(torch.tensor([[grid] * 4]), features.shape[1]))
    assert output.shape[1] >= 4 * keys.positions(grid)
    assert output.shape[1] <= 4 * (grid.patches + rows * SIDE + 1) + 1


@settings(max_examples=200, deadline=None)
@given(height=st.integers(1, 3000), width=st.integers(1, 3000), most=st.integers(0, 9), rows=st.integers(1, 6))
def test_the_numbers_of_a_grid_are_one_function_for_integers_and_tensors(height, width, most, rows):
    pairs = tuple((row, column) for row in range(1, rows + 1) for column in range(1, 7))
    keys = AnyResolution(arrangements=pairs, max_feature_tiles=most)
    best = select_best_resolution((height, width), [[24 * row, 24 * column] for row, column in pairs])
    if best is None:  # a line, of which no resolution shows anything
        return
    grid = grid_of(keys, (height, width))
    tiles = best[0] // 24, best[1] // 24
    assert grid.tiles == tiles
    assert grid.plain == (1 + tiles[0] * tiles[1], SIDE, SIDE)
    assert grid.patches == (1 + tiles[0] * tiles[1]) * SIDE**2
    tensors = Grid(*torch.tensor([grid, (2, 3, 3), (0, 0, 0), (1, 3, 3)]).unbind(-1))
    assert tensors.patches.tolist() == [grid.patches, 18, 0, 9]
    assert Grid(*(side.double() for side in tensors)).patches.tolist() == [grid.patches, 18, 0, 9]
    assert keys.positions(tensors).tolist() == [keys.positions(grid), 19, 0, 10]


@pytest.mark.parametrize(
    ("form", "patches", "grid"),
    [
        (ImageFormat(patch=4), None, None),
        (ImageFormat(patch=4, grid=(2, 3)), 6, Grid(1, 2, 3)),
        (ImageFormat(patch=4, multiple=3, arrangements=((1, 2), (2, 3), (4, 1))), 54, Grid(1, 6, 9)),
        # Joined tiles, and the whole image as one more tile
        (ImageFormat(patch=4, grid=(3, 3), arrangements=((1, 2), (2, 3))), 63, Grid.of_tiles(2, 3, (6, 9))),
    ],
)
def test_the_largest_image_has_all_patches_of_the_most_tiles(form, patches, grid):
    assert form.largest == grid
    assert grid is None or grid.patches == patches
