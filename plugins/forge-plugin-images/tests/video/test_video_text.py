"""`video_text`: which frames a row has, at what places and times, with which texts."""

from __future__ import annotations

import json
import re
import tarfile
from itertools import islice
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
from video_rows import MODEL, frames, shown

from forge_core.contracts.errors import ForgeError
from forge_plugin_cross_attention import CrossAttention
from forge_plugin_images import Span
from forge_plugin_images.decoding import FileImage
from forge_plugin_images.resize import FillResize, LongestResize, NativeResize, StretchResize
from forge_plugin_images.rows import Places
from forge_plugin_images.video import Frames, PyAV, Uniform, VideoText, VideoTextStream
from forge_plugin_text import Bytes
from forge_plugin_transformer import GroupedQueryAttention
from forge_plugin_vision import (
    VIDEO,
    Merger,
    MultimodalRope,
    Perceiver,
    QwenViT,
    TiledViT,
    VisionLanguage,
    VisionPart,
    image_input,
)
from forge_testing.images import tiny_model
from forge_testing.refusals import at, check_problems, naming, problems_of, refuses

PATCHES = 12
"""Of a frame."""


def lines(folder, *records):
    """A file of these records beside the clips."""
    path = folder / f"{abs(hash(str(records)))}.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


def text(ids):
    """Entries as text: `#` for a position of a video, `$` for an end of text."""
    return "".join("#" if id_ == VIDEO else "$" if id_ == 256 else chr(id_) for id_ in ids)


def test_a_clip_is_one_grid_before_its_caption(build, clips):
    data = build(VideoText(path=lines(clips, {"video": "a.mp4", "text": "hi"}), video=frames()))
    row = data[0]
    assert row["grids"].tolist() == [[4, 2, 6], [0, 0, 0], [0, 0, 0]]
    assert shown(row) == [[0, 5, 10, 15]]
    assert text(row["input_ids"]).rstrip("$") == "#" * 4 * PATCHES + "hi"
    assert row["labels"][4 * PATCHES - 1 : 4 * PATCHES + 2].tolist() == [ord("h"), ord("i"), 256]
    assert (row["labels"][: 4 * PATCHES - 1] == -100).all()
    assert row["grid_seconds"].tolist() == [1.25, 0, 0]


def test_times_stand_as_text_before_the_frames_and_are_not_learned(build, clips):
    path = lines(clips, {"video": "a.mp4", "text": "hi"})
    data = build(VideoText(path=path, video=frames(timestamps="text", timestamp_format="<{seconds:.2f}>{frame};")))
    row = data[0]
    frame = "#" * PATCHES
    assert text(row["input_ids"]).rstrip("$") == "".join(f"<{t:.2f}>{frame};" for t in (0, 1.25, 2.5, 3.75)) + "hi"
    assert (row["labels"] >= 0).sum() == 3
    assert row["grids"].tolist()[0] == [4, 2, 6]


def test_frames_of_a_part_have_the_times_of_the_clip(build, clips):
    path = lines(clips, {"video": "a.mp4", "start": 1.0, "end": 2.0, "text": "hi"})
    data = build(VideoText(path=path, video=frames(timestamps="text", timestamp_format="{seconds}|")))
    assert shown(data[0]) == [[4, 5, 6, 7]]
    assert text(data[0]["input_ids"]).replace("#", "").rstrip("$") == "1.0|1.25|1.5|1.75|hi"


def test_several_captions_follow_one_clip_each_with_its_end(build, clips):
    path = lines(clips, {"video": "a.mp4", "text": ["one", "two"], "q": "?"})
    row = build(VideoText(path=path, video=frames(2), prompt="q"))[0]
    written = "#" * 2 * PATCHES + "?one$?two"
    assert text(row["input_ids"]).rstrip("$") == written
    learned = [text([label]) for label in row["labels"] if label >= 0]
    assert "".join(learned) == "one$two$"
    row = build(VideoText(path=path, video=frames(2), captions="first"))[0]
    assert text(row["input_ids"]).rstrip("$").endswith("#one")


@pytest.mark.parametrize("captions", [[], ["one", 2], [None], 3])
def test_captions_that_are_no_texts_are_refused_with_their_place(build, clips, captions):
    path = lines(clips, {"video": "a.mp4", "text": captions})
    with pytest.raises(ForgeError, match=naming(Path(path).name, "text")):
        build(VideoText(path=path, video=frames(2)))[0]


def test_segments_are_shown_by_themselves_or_written_with_their_times(build, clips):
    segments = [{"start": 0, "end": 1, "text": "first"}, {"start": 2.5, "end": 4, "text": "last"}]
    path = lines(clips, {"video": "b.mp4", "segments": segments})
    row = build(VideoText(path=path, video=frames(3), segments="segments"))[0]
    assert shown(row) == [[0, 1, 3], [10, 12, 15]]
    clip = "#" * 3 * PATCHES
    assert text(row["input_ids"]).rstrip("$") == f"{clip}first{clip}last"
    form = "{start:.1f}-{end:.1f} {text}"
    row = build(VideoText(path=path, video=frames(2), segments="segments", segment_format=form))[0]
    assert text(row["input_ids"]).rstrip("$") == "#" * 2 * PATCHES + "0.0-1.0 first\n2.5-4.0 last"


def test_frames_shrink_until_a_clip_fits_and_then_become_fewer(build, clips):
    path = lines(clips, {"video": "a.mp4", "text": "hi"})
    row = build(VideoText(path=path, video=frames(8, max_patches=24)))[0]
    assert row["grids"].tolist()[0] == [8, 1, 3]
    row = build(VideoText(path=path, video=frames(8, max_patches=24, resize=NativeResize(min_patches=12))))[0]
    assert shown(row) == [[0, 15]]


def test_folders_of_clips_with_texts_beside_them_are_read(build, clips, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.mp4").write_bytes((clips / f"{name}.mp4").read_bytes())
        (tmp_path / f"{name}.txt").write_text(f"clip {name}")
    data = build(VideoText(path=str(tmp_path), video=frames(1)))
    assert [text(data[number]["input_ids"]).strip("#$") for number in range(2)] == ["clip a", "clip b"]


@pytest.mark.parametrize(
    ("record", "path", "facts"),
    [
        ({"video": 3, "text": "a"}, "data.sources.0", [":1", "'3'", "video"]),
        ({"video": "a.mp4", "text": 3}, "data.sources.0", [":1", "'text'", "'3'"]),
        ({"video": "a.mp4", "text": "a", "start": "x"}, "data.sources.0", [":1", "'start'", "'x'", "seconds"]),
        ({"video": "a.mp4", "text": "a", "start": 3, "end": 2}, "data.sources.0", [":1", "'end'", 2, "'start' 3"]),
        ({"video": "a.mp4", "text": "a", "start": 2, "end": 2}, "data.sources.0", [":1", "'end'", 2, "'start' 2"]),
        ({"video": "a.mp4", "text": "a", "start": float("nan")}, "data.sources.0", [":1", "'start'", "nan"]),
        ({"video": "a.mp4", "text": "a", "end": float("inf")}, "data.sources.0", [":1", "'end'", "inf"]),
        ({"video": "a.mp4", "text": "a", "end": -1}, "data.sources.0", [":1", "'end'", -1]),
        ({"video": "a.mp4", "text": "a", "end": True}, "data.sources.0", [":1", "'end'", True]),
        (
            {"video": "a.mp4", "text": "a", "start": 60},
            "data.sources.0.unreadable",
            ["a.mp4'", "60 s", "3.79 s"],
        ),
    ],
)
def test_a_record_that_cannot_be_shown_is_named(build, clips, record, path, facts):
    with refuses(path, *facts):
        build(VideoText(path=lines(clips, record), video=frames(2)))


@pytest.mark.parametrize(
    ("segments", "facts"),
    [
        ("all", ["'parts'", "'all'", "list"]),
        ([], ["'parts'", "'[]'"]),
        ([{"start": 0, "end": 1, "text": "a"}, "b"], ["'parts'", "list"]),
        ([{"start": 0, "end": 1, "text": "a"}, {"start": 1, "text": "b"}], ["segment 1", "'start', 'text'", "'end'"]),
        ([{"start": 0, "end": 1}], ["segment 0", "'start', 'end'", "'text'"]),
        ([{"end": 1, "text": 3}], ["segment 0", "'end', 'text'"]),
        ([{}], ["segment 0", "nothing"]),
    ],
)
def test_segments_without_a_text_or_an_end_are_refused_with_their_place(build, clips, segments, facts):
    path = lines(clips, {"video": "a.mp4", "parts": segments})
    with refuses("data.sources.0", f"{Path(path).name}:1", *facts):
        build(VideoText(path=path, video=frames(2), segments="parts"))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"segment_format": "{text}"}, at("data.sources.0.segment_format", "segments")),
        ({"segments": "parts", "captions": "first"}, at("data.sources.0.captions", "'first'", "segments")),
        (
            {"segments": "parts", "segment_format": "{start}"},
            at("data.sources.0.segment_format", "'{start}'", "{text}"),
        ),
        ({"segments": "parts", "segment_format": "{txt}"}, at("data.sources.0.segment_format", "'{txt}'", "KeyError")),
        (
            {"segments": "parts", "segment_format": "{text"},
            at("data.sources.0.segment_format", "'{text'", "ValueError"),
        ),
        ({"segments": "parts", "segment_format": "{}"}, at("data.sources.0.segment_format", "'{}'", "IndexError")),
        (
            {"segments": "parts", "segment_format": "{end.x}{text}"},
            at("data.sources.0.segment_format", "'{end.x}{text}'", "AttributeError"),
        ),
        ({"segments": "parts", "segment_format": "{text}"}, None),
        ({"segments": "parts", "captions": "all"}, None),
    ],
)
def test_keys_of_segments_are_refused_where_they_mean_nothing(make_job, clips, keys, expected):
    job = make_job(VideoText(path=lines(clips, {"video": "a.mp4"}), video=frames(), **keys))
    check_problems(problems_of(job), *([expected] if expected else []))


def test_a_job_whose_model_sees_nothing_is_refused(make_job, clips):
    dataset = VideoText(path=lines(clips, {"video": "a.mp4", "text": "x"}), video=frames())
    problems = problems_of(make_job(dataset, model=MODEL.language))
    check_problems([problem for problem in problems if "video" in problem.path], at("data.sources.0.video", "images"))


def refusals(make_job, clips, model, video, **settings):
    job = make_job(VideoText(path=lines(clips, {"video": "a.mp4", "text": "x"}), video=video), model=model, **settings)
    return problems_of(job)


def test_what_cannot_go_together_is_refused_when_the_job_is_checked(make_job, clips):
    def model(**vision):
        return attrs.evolve(MODEL, vision=attrs.evolve(MODEL.vision, **vision))

    def found(model, video, key="", *facts):
        expected = [at(f"data.sources.0.video.{key}".removesuffix("."), *facts)] if facts else []
        check_problems(refusals(make_job, clips, model, video), *expected)

    found(MODEL, frames(4, timestamps="text"))
    latents = model(adapter=Perceiver(latents=4, layers=1, heads=1, head_dim=8))
    check_problems(
        refusals(make_job, clips, latents, frames(timestamps="text")),
        at("data.sources.0.video", "order"),
        at("data.sources.0.video.timestamps", "'text'", "4, 4 and 4"),
    )
    crossed = attrs.evolve(MODEL, fusion=CrossAttention(every=1, heads=4))
    for blind in (latents, crossed):
        found(blind, frames(4), "", "order", "sampling.max_frames = 1")
        found(blind, frames(1))
    found(MODEL, frames(timestamps="positions"), "timestamps", "'positions'", 'type = "mrope"', 'time = "seconds"')
    found(MODEL, frames(timestamp_format="{seconds}s"), "timestamp_format", 'timestamps = "text"')
    for form, facts in {
        "now": ["'now'", "{seconds:.1f}"],
        "{seconds:q}": ["'{seconds:q}'", "ValueError"],
        "{frame}{frame}{seconds}": ["'{frame}{frame}{seconds}'", "{frame} twice"],
    }.items():
        found(MODEL, frames(timestamps="text", timestamp_format=form), "timestamp_format", *facts)
    found(MODEL, frames(resize=StretchResize()), "resize", "'stretch'", "'native' or 'fill'")
    room = ("3 patches", 8, "model.vision.patches_per_sequence")
    found(MODEL, frames(max_patches=3, resize=NativeResize(min_patches=8)), "max_patches", *room)
    found(MODEL, frames(max_patches=7, resize=NativeResize(min_patches=8)), "max_patches", 7, 8)
    found(MODEL, frames(max_patches=8, resize=NativeResize(min_patches=8)))
    found(MODEL, frames(max_patches=145), "max_patches", 145, "model.vision.patches_per_sequence = 144")
    found(MODEL, frames(max_patches=144))
    # More than an image's share of a sequence, of which a clip may have all
    found(MODEL, frames(max_patches=144, resize=NativeResize(min_patches=49)))
    found(MODEL, frames(resize=NativeResize(min_patches=8, max_patches=7)), "resize.min_patches", 8, 7)
    found(MODEL, frames(resize=NativeResize(min_patches=8, max_patches=8)))
    found(MODEL, frames(resize=LongestResize()), "resize", "one image", "'native' or 'fill'")
    one_size = tiny_model(16, 48, images_per_sequence=3, patches_per_sequence=144)
    found(one_size, frames(resize=FillResize(max_patches=12)), "resize", "'fill'", "16 x 48 pixels")
    found(one_size, frames())
    tiles = TiledViT(
        dim=16, layers=1, global_layers=1, heads=2, patch=8, tile=16, arrangements=((1, 1),), intermediate=(0,)
    )
    found(model(encoder=tiles), frames(), "", "tiles")


def test_positions_in_seconds_are_found_in_the_model(make_job, clips):
    rope = MultimodalRope(sections=(1, 1, 0), time="seconds")
    attention = GroupedQueryAttention(heads=4, kv_heads=2, rope=rope)
    model = attrs.evolve(MODEL, language=attrs.evolve(MODEL.language, attention=attention))
    assert refusals(make_job, clips, model, frames(timestamps="positions")) == []
    problems = refusals(make_job, clips, model, frames(timestamps="text"))
    check_problems(problems, at("model.language.attention.rope.time", "data.sources.0", '"seconds"', 'time = "apart"'))


def test_clips_are_read_from_archives_and_from_streams(build, clips, tmp_path):
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        for name in "ab":
            (tmp_path / f"{name}.txt").write_text(f"clip {name}")
            archive.add(clips / f"{name}.mp4", f"{name}.mp4")
            archive.add(tmp_path / f"{name}.txt", f"{name}.txt")
    data = build(VideoText(path=str(tmp_path / "shard.tar"), video=frames(2)))
    records = [{"video": str(clips / f"{name}.mp4"), "text": f"clip {name}"} for name in "ab"]
    (tmp_path / "0.jsonl").write_text("\n".join(map(json.dumps, records)))
    keys = {"path": "json", "data_files": str(tmp_path / "*.jsonl"), "lanes": 1}
    stream = build(VideoTextStream(**keys, video=frames(2)), global_batch_size=1).read(0, None)
    for number, (row, _) in enumerate(islice(stream, 2)):
        assert shown(row) == [[0, 15]]
        for name in ("input_ids", "patches", "grids", "grid_seconds"):
            assert (row[name] == data[number][name]).all()


def test_a_process_writes_how_fast_it_decodes(build, clips, caplog, monkeypatch):
    monkeypatch.setattr("forge_plugin_images.video.throughput.EVERY_S", 0.0)
    caplog.set_level("INFO")
    build(VideoText(path=lines(clips, {"video": "a.mp4", "text": "x"}), video=frames(2)))[0]
    assert re.search(r"videos: [1-9]\d* frames a second of decoding in this process", caplog.text)


def test_patches_of_several_frames_are_qwens_and_the_last_frame_fills_its_patch(make_job, clips):
    tower = QwenViT(dim=16, layers=1, heads=2, hidden=24, patch=8)
    vision = VisionPart(encoder=tower, adapter=Merger(), images_per_sequence=1, patches_per_sequence=96)
    model = VisionLanguage(language=MODEL.language, vision=vision)
    seen = image_input(make_job(VideoText(path=str(clips)), model=model))
    assert seen.format.frames == 2
    table = Frames(sampling=Uniform(fps=8, min_frames=3, max_frames=3), reader=PyAV(), timestamps="text")
    visual = table.build(seen, Bytes().build(None, list)).visual(FileImage(str(clips / "a.mp4")), Span(), None)
    choice, footprint = visual.choice(), visual.measure()
    assert (list(choice.numbers), choice.grid) == ([0, 7, 15], (2, 2, 6))
    times = Qwen3VLProcessor._calculate_timestamps(None, [0, 7, 15], 4.0, 2)
    assert choice.times.tolist() == pytest.approx(times)
    assert footprint.seconds == pytest.approx([times[1] - times[0]])
    assert [run.count for run in footprint.runs if isinstance(run, Places)] == [3, 3]

    reader = PyAV().build()
    frames_ = reader.frames(visual.file, reader.probe(visual.file), [0, 7, 15])
    off = {"do_resize": False, "do_convert_rgb": False, "do_rescale": False, "do_normalize": False}
    processor = Qwen3VLVideoProcessor(patch_size=8, temporal_patch_size=2, merge_size=2, **off)
    clip = torch.from_numpy(np.stack(frames_)).permute(0, 3, 1, 2)
    theirs = processor(videos=[clip], do_sample_frames=False, return_tensors="pt")
    assert theirs["video_grid_thw"].tolist() == [list(choice.grid)]
    blocks = theirs["pixel_values_videos"].view(2, 1, 3, 2, 2, -1)  # time, then blocks of 2 x 2 patches
    by_rows = blocks.permute(0, 1, 3, 2, 4, 5).flatten(0, 4)
    assert torch.equal(torch.from_numpy(visual.read()).float(), by_rows.float())


def test_frames_of_a_clip_share_its_pixels_as_in_qwen3_vl(make_job, clips):
    tower = QwenViT(dim=16, layers=1, heads=2, hidden=24, patch=8)
    vision = VisionPart(encoder=tower, adapter=Merger(), images_per_sequence=1, patches_per_sequence=600)
    model = VisionLanguage(language=MODEL.language, vision=vision)
    seen = image_input(make_job(VideoText(path=str(clips)), model=model))
    source = Frames(sampling=Uniform(), reader=PyAV()).build(seen, Bytes().build(None, list))
    draw = np.random.default_rng(0)
    for _ in range(200):
        height, width, entries = draw.integers(40, 400), draw.integers(40, 400), int(draw.integers(1, 20))
        expected = smart_resize(2 * entries, int(height), int(width), 2, 16, 1, 600 * 2 * 8**2)
        [grid] = source.processor(entries).grids((int(height), int(width)))
        assert (8 * grid.rows, 8 * grid.columns) == expected, (height, width, entries)
