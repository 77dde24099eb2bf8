"""Clips of models whose images are tiles that an adapter joins: every frame is one tile (LLaVA-OneVision)."""

from __future__ import annotations

import json

import attrs
from video_rows import frames

from forge_plugin_images.video import VideoText
from forge_plugin_vision import VIDEO, AnyResolution, VisionPart
from forge_testing import job_problems
from forge_testing.images import tiny_model
from forge_testing.refusals import at, check_problems, problems_of

PLAIN = tiny_model(32, 32)
MODEL = attrs.evolve(
    PLAIN,
    vision=VisionPart(
        encoder=PLAIN.vision.encoder,
        adapter=AnyResolution(arrangements=((1, 1), (1, 2)), max_feature_tiles=2, frame_pool=3, hidden=8),
        images_per_sequence=2,
    ),
)
"""Tiles of 4 x 4 patches."""


def test_a_clip_has_as_many_pooled_features_a_frame_and_one_vector_at_its_end(build, make_job, clips):
    path = clips / "tiles.jsonl"
    path.write_text(json.dumps({"video": "a.mp4", "text": "hi"}))
    dataset = VideoText(path=str(path), video=frames(3))
    assert not job_problems(make_job(dataset, model=MODEL))
    row = build(dataset, model=MODEL)[0]
    assert row["grids"].tolist() == [[3, 4, 4], [0, 0, 0]]
    assert (row["input_ids"] == VIDEO).sum() == 3 * 2 * 2 + 1
    assert row["patches"][: 3 * 16].any(1).all()
    times = VideoText(path=str(path), video=frames(3, timestamps="text", timestamp_format="{seconds}"))
    problems = problems_of(make_job(times, model=MODEL))
    check_problems(problems, at("data.sources.0.video.timestamps", "'text'", "2, 3 and 4", "9, 13"))
