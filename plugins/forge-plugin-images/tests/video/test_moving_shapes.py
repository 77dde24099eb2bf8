"""`moving_shapes`: clips whose motion no single frame tells, encoded once, and held-out combinations of words."""

from __future__ import annotations

from collections import Counter
from itertools import product

import attrs
import numpy as np
import pytest
import torch
from video_rows import FORM, frames

from forge_core.engine.build import build_context, build_model
from forge_plugin_images.decoding import BytesImage
from forge_plugin_images.patches import frames_of
from forge_plugin_images.video import MovingShapes, PyAV, moving_clips
from forge_plugin_images.video.motion_images import draw_motion, place
from forge_plugin_images.video.motions import DIRECTIONS, Motion, split_motions
from forge_plugin_images.video.moving_clips import encoded
from forge_plugin_text import Bytes
from forge_plugin_vision import VIDEO, Grid, Perceiver
from forge_testing.images import tiny_model
from forge_testing.refusals import at, check_problems, problems_of, refuses
from forge_testing.suites import DatasetSuite

FEW = {"colours": ("red", "blue"), "shapes": ("disc",), "directions": ("up", "down"), "size": (16, 16)}
FEW |= {"frames": 4, "radius": (3, 4), "drawings": 2, "held_out": 2, "held_out_drawings": 3}
MODEL = tiny_model(16, 16, patches_per_sequence=16)
"""Sees four frames of 2 x 2 patches."""


def decoded(keys, motion, drawing=0):
    """The frames of a clip as they come out of its mp4 file."""
    file, reader = BytesImage("clip", encoded(keys, motion, drawing)), PyAV().build()
    clip = reader.probe(file)
    return np.stack(reader.frames(file, clip, range(len(clip.times)))), clip


class TestMovingShapes(DatasetSuite):
    has_images = True
    job = {"model": MODEL, "seq_len": 56, "data": {"tokenizer": Bytes()}}

    def make(self, folder):
        return MovingShapes(**FEW, video=frames(4))


def test_in_every_frame_of_every_motion_each_place_is_as_likely():
    """Counted over all starts: a frame alone says nothing about direction and speed."""
    size = (6, 8)
    everywhere = Counter(product(range(8), range(6)))
    for direction, speed, frame in product(DIRECTIONS, (1, 2, 3), range(5)):
        places = (place(np.array(start), direction, speed, frame, size) for start in everywhere)
        assert Counter(tuple(each.tolist()) for each in places) == everywhere


def test_clips_of_all_motions_begin_with_the_same_frame_and_go_on_with_others():
    keys = MovingShapes(radius=(4, 5))
    motions = [Motion("red", "ring", direction, speed) for direction in DIRECTIONS for speed in keys.speeds]
    first, second, last = (Counter(draw_motion(keys, each, 3)[k].tobytes() for each in motions) for k in (0, 1, -1))
    assert list(first.values()) == [len(motions)]
    assert len(second) == len(last) == len(motions)


def test_a_shape_moves_where_its_caption_says():
    keys = MovingShapes(size=(32, 48), noise=0, speeds={"slowly": 1, "fast": 3}, radius=(4, 4))
    y, x = np.mgrid[:32, :48]
    for direction, (right, down) in DIRECTIONS.items():
        drawn = draw_motion(keys, Motion("white", "disc", direction, "fast"), 0).astype(float)[..., 0]
        cover = (drawn - drawn.min()) / np.ptp(drawn)
        # Mean places on circles, since the sides are joined.
        angles = [
            [np.angle((each * np.exp(2j * np.pi * at / side)).sum()) * side / (2 * np.pi) for each in cover]
            for at, side in ((x, 48), (y, 32))
        ]
        steps = [(np.diff(each) + side / 2) % side - side / 2 for each, side in zip(angles, (48, 32), strict=True)]
        assert steps[0] == pytest.approx(3 * right, abs=0.05)
        assert steps[1] == pytest.approx(3 * down, abs=0.05)


def test_a_frame_is_decoded_to_the_same_pixels_whatever_came_before_it():
    """In frame 8 of a clip 16 wide, what moves left meets what moves right, each a pixel a frame."""
    keys = MovingShapes(size=(16, 16), frames=9, radius=(4, 5), fps=5)
    (left, clip), (right, _) = (decoded(keys, Motion("green", "cross", each, "slowly")) for each in ("left", "right"))
    assert (left[8] == right[8]).all()
    assert (left[7] != right[7]).any()
    assert clip.times == pytest.approx(np.arange(9) / 5)
    drawn = draw_motion(keys, Motion("green", "cross", "left", "slowly"), 0)
    assert np.abs(left.astype(int) - drawn).mean() < 6  # colours have half the resolution


def test_a_row_is_the_frames_of_a_clip_in_order_and_then_its_caption(build):
    keys = MovingShapes(**FEW, video=frames(4))
    data = build(keys, model=MODEL, seq_len=56)
    split = split_motions(keys)
    assert (len(split.training), len(data), len(data.held_out)) == (6, 12, 6)
    for part, motions, drawings in ((data, split.training, (0, 1)), (data.held_out, split.held_out, (2, 3, 4))):
        for number in range(len(part)):
            row, motion = part[number], motions[number // len(drawings)]
            assert row["grids"].tolist() == [[4, 2, 2]]
            caption = [id_ for id_ in row["input_ids"].tolist() if id_ not in (VIDEO, 256)]
            assert bytes(caption).decode() == motion.caption
            shown = frames_of(row["patches"], row["grids"][0], FORM).astype(int)
            drawn = draw_motion(keys, motion, drawings[number % len(drawings)]).astype(int)
            distances = np.abs(shown[:, None] - drawn[None]).mean((2, 3, 4))
            assert distances.argmin(1).tolist() == [0, 1, 2, 3]
    texts = {bytes(row["input_ids"][16:40].clip(0, 255).tolist()) for row in map(data.__getitem__, range(len(data)))}
    assert len(texts) == 6


def test_clips_are_encoded_once_however_they_are_read(build, monkeypatch):
    build(MovingShapes(**FEW, video=frames(4)), model=MODEL, seq_len=56)
    monkeypatch.setattr(moving_clips, "encoded", lambda *_: pytest.fail("it encodes again"))
    assert build(MovingShapes(**FEW, video=frames(2)), model=MODEL, seq_len=56)[0]["grids"].tolist() == [[2, 2, 2]]
    with pytest.raises(pytest.fail.Exception, match="it encodes again"):
        build(MovingShapes(**FEW, video=frames(4), seed=1), model=MODEL, seq_len=56)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"held_out": 4, "directions": ("up",)}, at("data.sources.0.held_out", 4, "'red'")),
        ({"speeds": {"slowly": 1, "fast": 8}}, at("data.sources.0.speeds", "'fast'", "8 pixels", 8)),
        ({"radius": (3, 9)}, at("data.sources.0.radius", 9, "16 pixels", 8)),
        ({"radius": (3, 8.5)}, at("data.sources.0.radius", 8.5, 8)),
        ({"radius": (3, 8), "speeds": {"slowly": 1, "fast": 7}}, None),
    ],
)
def test_keys_that_show_no_motion_are_refused_when_the_job_is_checked(make_job, keys, expected):
    check_problems(
        problems_of(make_job(MovingShapes(**{**FEW, **keys}, video=frames(4)), model=MODEL)),
        *([expected] if expected else []),
    )


def test_words_that_nothing_is_trained_on_are_refused_by_the_build_too(build):
    with refuses("data.sources.0.held_out", 4, "'red'"):
        build(MovingShapes(**{**FEW, "held_out": 4, "directions": ("up",)}, video=frames(4)), model=MODEL)


def test_what_reads_and_sees_nothing_is_refused(make_job):
    job = make_job(MovingShapes(**FEW, video=frames(4)), data={"tokenizer": None}, model=MODEL.language)
    problems = [problem for problem in problems_of(job) if problem.path == "data.sources.0"]
    check_problems(problems, at("data.sources.0", "tokenizer"), at("data.sources.0", "images"))


def test_what_has_no_room_is_refused(build):
    with refuses("data.sources.0.too_long", "18 of 18", 24):
        build(MovingShapes(**FEW, video=frames(4)), model=MODEL, seq_len=24)


def test_a_model_to_which_frames_are_a_set_is_refused_and_to_it_they_are(make_job, catalog, tmp_path):
    apart, latents = MODEL, attrs.evolve(MODEL, vision=attrs.evolve(MODEL.vision, adapter=Perceiver(layers=1, heads=2)))
    keys = MovingShapes(**FEW, video=frames(4))
    check_problems(
        problems_of(make_job(keys, model=latents)), at("data.sources.0", "order"), at("data.sources.0.video", "order")
    )
    assert problems_of(make_job(keys, model=apart)) == []
    for model, knows_order in ((apart, True), (latents, False)):
        job = make_job(keys, model=model)
        built = build_model(job, build_context(job, catalog, tmp_path)).model
        patches = torch.randint(0, 256, (1, 16, 192), generator=torch.manual_seed(0), dtype=torch.uint8)
        shown = [patches, patches.view(1, 4, 4, 192).flip(1).view(1, 16, 192)]
        ids = torch.full((1, 1), VIDEO).expand(1, job.model.image_input().positions(Grid(4, 2, 2)))
        rest = {"input_ids": ids, "grids": torch.tensor([[[4, 2, 2]]]), "grid_seconds": torch.zeros(1, 1)}
        one, other = (built.vision(built.prepare({**rest, "patches": each})) for each in shown)
        assert torch.allclose(one, other, atol=1e-6) != knows_order
