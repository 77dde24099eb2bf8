"""Coordinates for `mrope` equal `get_rope_index` of transformers, integer for integer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen3VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from forge_core.contracts.errors import ForgeError
from forge_plugin_transformer import PlainRope
from forge_plugin_vision import GRIDS, IMAGE, SECONDS, VIDEO, MultimodalRope
from forge_plugin_vision.modules.mrope import MultimodalRotary, axes
from forge_plugin_vision.modules.spatial_positions import SpatialPositions
from forge_testing.refusals import naming, refuses

S, N = 40, 4
Grid = tuple[int, int, int]
"""In patches."""


class Item(NamedTuple):
    """An image or a video of a row."""

    id: int
    """Of its positions."""
    grid: Grid
    seconds: float = 0.0
    """From one entry of its time axis to the next."""
    texts: tuple[int, ...] = ()
    """Tokens before the second and further of its frames."""


ROWS: dict[str, list[Item]] = {
    "no image": [],
    "one": [Item(IMAGE, (1, 6, 4))],
    "several": [Item(IMAGE, (1, 2, 10)), Item(IMAGE, (1, 4, 4)), Item(IMAGE, (1, 2, 2))],
    "a video": [Item(VIDEO, (3, 4, 6), 1.0)],
    "an image and two videos": [Item(IMAGE, (1, 4, 2)), Item(VIDEO, (2, 2, 4), 1.0), Item(VIDEO, (4, 2, 2), 1.0)],
}
FAMILIES = {
    "qwen2_5_vl": (Qwen2_5_VLModel, Qwen2_5_VLConfig, "seconds"),
    "qwen3_vl": (Qwen3VLModel, Qwen3VLConfig, "apart"),
}


def row_of(items: list[Item], texts: list[int] | None = None) -> Tensor:
    """Text and items in turn; `texts` are the tokens before each item and after the last."""
    texts = texts or [2, *(3 for _ in items)]
    parts = [torch.arange(texts[0])]
    for (id_, (frames, rows, columns), _, between), after in zip(items, texts[1:], strict=True):
        frame = torch.full((rows * columns // 4,), id_)
        for number in range(frames):
            parts += [torch.arange(between[number - 1]) if number and between else torch.arange(0), frame]
        parts.append(torch.arange(after))
    return torch.cat(parts)


def batch_of(rows: list[list[Item]], texts: list[list[int]] | None = None) -> dict[str, Tensor]:
    """Rows of S positions, or of as many as the longest has; what is missing is text."""
    ids = [row_of(items, texts[number] if texts else None) for number, items in enumerate(rows)]
    length = max(S, *map(len, ids))
    grids, seconds = torch.zeros(len(rows), N, 3, dtype=torch.int64), torch.zeros(len(rows), N)
    for row, items in enumerate(rows):
        for number, item in enumerate(items):
            grids[row, number], seconds[row, number] = torch.tensor(item.grid), item.seconds
    padded = [torch.cat([row, torch.zeros(length - len(row), dtype=torch.int64)]) for row in ids]
    return {"input_ids": torch.stack(padded), GRIDS: grids, SECONDS: seconds}


def expected(family: str, batch: dict[str, Tensor], per_second: int = 2) -> tuple[Tensor, Tensor]:
    """Of `get_rope_index`, which uses the configuration alone."""
    model, config, _ = FAMILIES[family]
    tower = {"spatial_merge_size": 2} | ({"tokens_per_second": per_second} if family == "qwen2_5_vl" else {})
    hollow: Any = model.__new__(model)
    torch.nn.Module.__init__(hollow)
    hollow.config = config(vision_config=tower)
    # An image of the row is a video if its first position is one's.
    ids, grids, seconds = (batch[name] for name in ("input_ids", GRIDS, SECONDS))
    sizes = (grids.prod(-1) // 4).flatten().tolist()
    kinds = ids[ids < 0].split([size for size in sizes if size])
    real, every = grids.flatten(0, 1)[[size > 0 for size in sizes]], seconds.flatten()[[size > 0 for size in sizes]]
    is_video = torch.tensor([bool(kind[0] == VIDEO) for kind in kinds], dtype=torch.bool)
    clips = {"video_grid_thw": real[is_video]} if is_video.any() else {}
    if clips and family == "qwen2_5_vl":
        clips["second_per_grid_ts"] = every[is_video]
    images = {} if is_video.all() else {"image_grid_thw": real[~is_video]}
    types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    positions, delta = hollow.get_rope_index(ids, types, **images, **clips)
    return positions.permute(1, 2, 0), delta


def test_positions_of_images_and_videos_are_those_of_qwen2_5_vl() -> None:
    batch = batch_of(list(ROWS.values()))
    theirs, delta = expected("qwen2_5_vl", batch, 4)
    ours, shift = SpatialPositions(2, "seconds", 4.0)(batch)
    assert torch.equal(ours, theirs)
    assert torch.equal(shift, delta)


def test_positions_of_images_are_those_of_qwen3_vl() -> None:
    batch = batch_of([items for items in ROWS.values() if all(item.id == IMAGE for item in items)])
    theirs, delta = expected("qwen3_vl", batch)
    ours, shift = SpatialPositions(2, "apart", 1.0)(batch)
    assert torch.equal(ours, theirs)
    assert torch.equal(shift, delta)


SIDES = st.sampled_from([2, 4, 6])


@st.composite
def prompts(draw: st.DrawFn, apart: bool) -> tuple[list[Item], list[int]]:
    """Up to four images and videos with text before, between and after; videos have text between frames if `apart`."""
    items = []
    for _ in range(draw(st.integers(0, N))):
        if draw(st.booleans()):
            items.append(Item(IMAGE, (1, draw(SIDES), draw(SIDES))))
            continue
        frames = draw(st.integers(1, 5))
        between = tuple(draw(st.lists(st.integers(1, 4), min_size=frames - 1, max_size=frames - 1)))
        seconds = draw(st.floats(0.0078125, 3.0, width=32))
        items.append(Item(VIDEO, (frames, draw(SIDES), draw(SIDES)), seconds, between if apart else ()))
    # At least a token between two items, without which transformers takes them for one.
    return items, [draw(st.integers(0, 3)), *(draw(st.integers(1, 5)) for _ in items)]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_prompt_has_the_positions_of_transformers_alone_and_packed(family: str, data: st.DataObject) -> None:
    """Prompts with images and clips, each its own seconds; a row of all of them has each one's positions."""
    time = FAMILIES[family][2]
    drawn = [data.draw(prompts(time == "apart")) for _ in range(data.draw(st.integers(1, 3)))]
    per_second = data.draw(st.integers(1, 25))
    compute = SpatialPositions(2, time, float(per_second))
    batch = batch_of([items for items, _ in drawn], [texts for _, texts in drawn])
    theirs, _ = expected(family, batch, per_second)
    ours, shift = compute(batch)
    assert torch.equal(ours, theirs)
    for row, (items, texts) in enumerate(drawn):  # what is generated goes on behind the last token of the prompt
        length = len(row_of(items, texts))
        if items or texts[0]:
            assert length + int(shift[row]) == int(theirs[row, length - 1, 0]) + 1

    rows = [row_of(*each) for each in drawn]
    grids, seconds = (batch[name].flatten(0, 1) for name in (GRIDS, SECONDS))
    filled = grids.prod(-1) > 0
    packed = {
        "input_ids": torch.cat(rows)[None],
        "positions": torch.cat([torch.arange(len(row)) for row in rows])[None],
        "document_ids": torch.cat([torch.full((len(row),), number) for number, row in enumerate(rows)])[None],
        GRIDS: torch.cat([grids[filled], grids[~filled]])[None],
        SECONDS: torch.cat([seconds[filled], seconds[~filled]])[None],
    }
    together, _ = compute(packed)
    assert torch.equal(together[0], torch.cat([theirs[n, : len(row)] for n, row in enumerate(rows)]))


def test_videos_in_seconds_need_their_seconds() -> None:
    batch = {name: entry for name, entry in batch_of([ROWS["a video"]]).items() if name != SECONDS}
    with pytest.raises(ForgeError, match=naming("`grid_seconds`", "mrope")):
        SpatialPositions(2, "seconds", 2.0)(batch)


def test_time_is_rounded_down_for_each_frame() -> None:
    batch = batch_of([[Item(VIDEO, (4, 2, 2), 1.25)]])
    for compute in (SpatialPositions(2, "frames", 2.5), SpatialPositions(2, "seconds", 2.0)):
        ours, _ = compute(batch)
        assert (ours[0, 2:6, 0] - ours[0, 2, 0]).tolist() == [0, 2, 5, 7]


@pytest.mark.parametrize("has_positions", [True, False])
def test_text_has_its_plain_positions(has_positions: bool) -> None:
    ids = torch.arange(2 * S).view(2, S)
    positions = {"positions": torch.arange(S).flip(0).expand(2, S)} if has_positions else {}
    ours, _ = SpatialPositions(2, "frames", 1.0)(
        {"input_ids": ids, GRIDS: torch.zeros(2, N, 3, dtype=torch.int64), **positions}
    )
    plain = positions.get("positions", torch.arange(S).expand(2, S))
    assert torch.equal(ours, plain.unsqueeze(-1).expand(-1, -1, 3))


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
        [1.0, 0.5, 0.25, 0.125], [0, 1, 2, 0], time="frames", interval=1, amplitude=1.0, length=8, dtype=torch.float64
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
    with refuses("model.language.attention.rope.sections", "3 pairs", 16, 4):
        MultimodalRope(sections=(1, 1, 1), partial_rotary_factor=0.5).build(context, head_dim=16)
