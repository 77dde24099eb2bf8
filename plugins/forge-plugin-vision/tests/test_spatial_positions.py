"""Coordinates for `mrope` equal `get_rope_index` of transformers, integer for integer."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen3VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from forge_core.contracts.errors import JobError
from forge_plugin_transformer import PlainRope
from forge_plugin_vision import GRIDS, IMAGE, VIDEO, MultimodalRope
from forge_plugin_vision.modules.mrope import MultimodalRotary, axes
from forge_plugin_vision.modules.spatial_positions import SpatialPositions

S, N = 40, 4
Item = tuple[int, tuple[int, int, int]]
"""The id of an item's positions, and its grid in patches."""
ROWS: dict[str, list[Item]] = {
    "no image": [],
    "one": [(IMAGE, (1, 6, 4))],
    "several": [(IMAGE, (1, 2, 10)), (IMAGE, (1, 4, 4)), (IMAGE, (1, 2, 2))],
    "a video": [(VIDEO, (3, 4, 6))],
    "an image and two videos": [(IMAGE, (1, 4, 2)), (VIDEO, (2, 2, 4)), (VIDEO, (4, 2, 2))],
}


def row_of(items: list[Item], ends_with: int | None = None) -> tuple[Tensor, Tensor]:
    """Text and items in turn, to S positions or up to the last item; and the items' grids."""
    parts = [torch.arange(2)]
    for id_, (frames, rows, columns) in items:
        parts += [torch.full((frames * rows * columns // 4,), id_), torch.arange(3)]
    row = torch.cat(parts)
    grids = torch.zeros(N, 3, dtype=torch.int64)
    for number, (_, grid) in enumerate(items):
        grids[number] = torch.tensor(grid)
    return torch.cat([row, torch.zeros(S - len(row), dtype=torch.int64)]), grids


def batch_of(rows: list[list[Item]]) -> dict[str, Tensor]:
    ids, grids = zip(*(row_of(items) for items in rows), strict=True)
    return {"input_ids": torch.stack(ids), GRIDS: torch.stack(grids)}


def expected(model: Any, tower: dict[str, int], rows: list[list[Item]]) -> tuple[Tensor, Tensor]:
    """Of `get_rope_index`, which uses the configuration alone."""
    batch = batch_of(rows)
    config = (Qwen3VLConfig if model is Qwen3VLModel else Qwen2_5_VLConfig)(vision_config=tower)
    hollow = model.__new__(model)
    torch.nn.Module.__init__(hollow)
    hollow.config = config
    every = list(itertools.chain.from_iterable(rows))
    images, videos = ([grid for id_, grid in every if id_ == kind] for kind in (IMAGE, VIDEO))
    types = (batch["input_ids"] == IMAGE).int() + 2 * (batch["input_ids"] == VIDEO).int()
    positions, delta = hollow.get_rope_index(
        batch["input_ids"],
        types,
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor(videos) if videos else None,
    )
    return positions.permute(1, 2, 0), delta


def test_positions_of_images_and_videos_are_those_of_qwen2_5_vl() -> None:
    rows = list(ROWS.values())
    theirs, delta = expected(Qwen2_5_VLModel, {"spatial_merge_size": 2, "tokens_per_second": 4}, rows)
    ours, shift = SpatialPositions(2, 4.0)(batch_of(rows))
    assert torch.equal(ours, theirs)
    assert torch.equal(shift, delta)


def test_positions_of_images_are_those_of_qwen3_vl() -> None:
    rows = [items for items in ROWS.values() if all(id_ == IMAGE for id_, _ in items)]
    theirs, delta = expected(Qwen3VLModel, {"spatial_merge_size": 2}, rows)
    ours, shift = SpatialPositions(2, 1.0)(batch_of(rows))
    assert torch.equal(ours, theirs)
    assert torch.equal(shift, delta)


def test_frames_with_text_between_are_images_of_their_own_in_qwen3_vl() -> None:
    """Its `get_rope_index` splits a video, since its processor writes the time before each frame."""
    frames: list[Item] = [(VIDEO, (1, 4, 4))] * 3
    batch = batch_of([frames])
    config_rows = [[(VIDEO, (3, 4, 4))]]
    hollow = Qwen3VLModel.__new__(Qwen3VLModel)
    torch.nn.Module.__init__(hollow)
    hollow.config = Qwen3VLConfig(vision_config={"spatial_merge_size": 2})
    types = 2 * (batch["input_ids"] == VIDEO).int()
    theirs, _ = hollow.get_rope_index(batch["input_ids"], types, video_grid_thw=torch.tensor([config_rows[0][0][1]]))
    assert torch.equal(SpatialPositions(2, 1.0)(batch)[0], theirs.permute(1, 2, 0))


def test_time_is_rounded_down_for_each_frame() -> None:
    ours, _ = SpatialPositions(2, 2.5)(batch_of([[(VIDEO, (4, 2, 2))]]))
    assert (ours[0, 2:6, 0] - ours[0, 2, 0]).tolist() == [0, 2, 5, 7]


@pytest.mark.parametrize("has_positions", [True, False])
def test_text_has_its_plain_positions(has_positions: bool) -> None:
    ids = torch.arange(2 * S).view(2, S)
    positions = {"positions": torch.arange(S).flip(0).expand(2, S)} if has_positions else {}
    ours, _ = SpatialPositions(2, 1.0)({"input_ids": ids, GRIDS: torch.zeros(2, N, 3, dtype=torch.int64), **positions})
    plain = positions.get("positions", torch.arange(S).expand(2, S))
    assert torch.equal(ours, plain.unsqueeze(-1).expand(-1, -1, 3))


def test_documents_of_a_row_have_the_positions_that_they_have_alone() -> None:
    one, two = ROWS["one"], ROWS["several"]
    (first, grids), (second, more) = row_of(one), row_of(two)
    together = torch.cat([grids[: len(one)], more[: len(two)]])
    batch = {
        "input_ids": torch.cat([first, second])[None],
        "positions": torch.arange(S).repeat(2)[None],
        "document_ids": torch.arange(2).repeat_interleave(S)[None],
        GRIDS: together[None],
    }
    ours, _ = SpatialPositions(2, 1.0)(batch)
    alone, _ = SpatialPositions(2, 1.0)(batch_of([one, two]))
    assert torch.equal(ours, alone.flatten(0, 1)[None])


def test_axes_are_those_of_the_reference() -> None:
    """Qwen2.5-VL's pairs by `split(section)`, Qwen3-VL's by slices with a step of three."""
    assert axes((2, 1, 1), interleaved=False) == [0, 0, 1, 2]
    sections = (24, 20, 20)
    theirs = [0] * sum(sections)
    for axis in (1, 2):
        theirs[axis : sections[axis] * 3 : 3] = [axis] * sections[axis]
    assert axes(sections, interleaved=True) == theirs


def test_equal_coordinates_turn_as_one_position_does() -> None:
    rotary = MultimodalRotary(
        [1.0, 0.5, 0.25, 0.125], [0, 1, 2, 0], frame_interval=1, amplitude=1.0, length=8, dtype=torch.float64
    )
    rotary.init_buffers(torch.device("cpu"))
    positions = torch.randint(100, (2, 8), generator=torch.Generator().manual_seed(0))
    for ours, plain in zip(rotary(8, positions.unsqueeze(-1).expand(-1, -1, 3)), rotary(8, positions), strict=True):
        assert torch.equal(ours, plain)


def test_a_part_of_each_head_may_be_rotated() -> None:
    """Text is encoded as by `plain` with that share."""
    context = SimpleNamespace(job=SimpleNamespace(train=SimpleNamespace(seq_len=6)), dtype=torch.float32)
    built = []
    for rope in (MultimodalRope(sections=(2, 1, 1), partial_rotary_factor=0.5), PlainRope(partial_rotary_factor=0.5)):
        rotary = rope.build(context, head_dim=16)
        rotary.init_buffers(torch.device("cpu"))
        built.append(rotary)
    spatial, plain = built
    equal = torch.arange(6)[None, :, None].expand(1, 6, 3)
    for actual, expected in zip(spatial(6, equal), plain(6, torch.arange(6)[None]), strict=True):
        assert actual.shape[-1] == 8
        assert torch.equal(actual, expected)
    with pytest.raises(JobError, match="3 pairs, but heads of 16 have 4"):
        MultimodalRope(sections=(1, 1, 1), partial_rotary_factor=0.5).build(context, head_dim=16)
