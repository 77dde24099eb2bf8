"""Clips in rows and runs: drawn by seed and number alone, packed, resumed, bounded in memory, named where broken."""

from __future__ import annotations

import hashlib
import json
import tracemalloc

import attrs
import numpy as np
import pytest
from PIL import Image
from video_rows import frames, shown

from forge_core.checkpoint.state import Progress
from forge_core.contracts.errors import DataError
from forge_core.data.loader import TrainLoader
from forge_core.data.reading import collate
from forge_core.engine.build import build_context, build_datasets, build_run, build_tokenizer
from forge_plugin_images import Interleaved, Span
from forge_plugin_images.decoding import FileImage
from forge_plugin_images.video import Clip, Frames, PyAV, Uniform, VideoText
from forge_plugin_images.video import clips as clips_module
from forge_plugin_text import Bytes
from forge_plugin_text.packing import BestFit
from forge_plugin_vision import image_input
from forge_testing.clips import bar_code, write_clip
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import lacks, naming, refuses

PACKED = {"seq_len": 120, "data": {"packing": BestFit()}}


def drawn(most):
    """A table whose frames are drawn."""
    return Frames(sampling=Uniform(max_frames=most, min_frames=most, jitter=True))


@pytest.fixture
def mixed(clips):
    """A file of fourteen documents: clips, images, both, and text alone."""
    Image.fromarray(np.full((8, 16, 3), 90, np.uint8)).save(clips / "grey.png")
    lines = []
    for number in range(14):
        clip, still = f"{'abcd'[number % 4]}.mp4", number % 3 == 0
        content = f"{number}" + ("<image>i" if still else "") + ("<video>v" if number % 4 != 2 else "text alone")
        record = {"content": content, "images": ["grey.png"] * still, "videos": [clip] * (number % 4 != 2)}
        lines.append(json.dumps(record))
    (clips / "mixed.jsonl").write_text("\n".join(lines))
    return str(clips / "mixed.jsonl")


def test_rows_of_clips_images_and_texts_have_the_losses_of_their_documents_alone(make_job, mixed, catalog):
    def loss(**settings):
        table = frames(2, timestamps="text", timestamp_format="{seconds:.0f}:")
        job = make_job(Interleaved(path=mixed, video=table), **{**PACKED, **settings}, precision="fp64")
        run = build_run(job, build_context(job, catalog, None))
        [data] = run.datasets
        rows = [data[row] for row in range(len(data))]
        sums, counts = run.executor.evaluate([collate(rows)]).per_sequence
        return rows, sums.sum().item(), int(counts.sum())

    rows, packed_sum, packed_count = loss()
    alone, sum_alone, count_alone = loss(data={})
    assert len(rows) < len(alone) == 14
    assert any({1, 2} <= {*row["grids"][:, 0].tolist()} for row in rows), "some row has an image and a clip"
    assert (packed_count, len(alone)) == (count_alone, 14)
    assert packed_sum == pytest.approx(sum_alone, rel=1e-12)


def fingerprints(job, catalog, steps, progress=None):
    """SHA-256 of the rows of this rank by their places in the batch, step by step, and the position after them."""
    context = build_context(job, catalog, None)
    context = attrs.evolve(context, tokenizer=build_tokenizer(job, context))
    loader = TrainLoader(job, build_datasets(job, context), context, progress)
    try:
        rows = [dict(pair for batch in loader.next_step() for pair in digests(batch)) for _ in range(steps)]
        return rows, json.loads(json.dumps(loader.state()))
    finally:
        loader.close()


def digests(batch):
    names = ("patches", "grids", "grid_seconds", "input_ids")
    for row, slot in enumerate(batch["slots"].tolist()):
        data = b"".join(batch[name][row].numpy().tobytes() for name in names)
        yield slot, hashlib.sha256(data).hexdigest()


def test_a_run_continues_with_the_same_frames_on_two_ranks_with_two_workers(make_job, mixed, catalog):
    source = Interleaved(path=mixed, video=drawn(3))
    job = make_job(source, **PACKED, global_batch_size=4, steps=6)
    whole, _ = fingerprints(job, catalog, 6)
    first, position = fingerprints(job, catalog, 2)
    two_workers = attrs.evolve(job, data=attrs.evolve(job.data, workers=2))
    progress = Progress(step=2, samples=position)
    ranks = run_on_ranks(2, lambda _: fingerprints(two_workers, catalog, 4, progress)[0])
    assert [*first, *(one | other for one, other in zip(*ranks, strict=True))] == whole
    assert {len(step) for step in whole} == {4}


def test_frames_are_drawn_by_the_seed_and_the_number_of_the_document(build, clips):
    (clips / "twice.jsonl").write_text("\n".join(json.dumps({"video": "a.mp4", "text": "x"}) for _ in range(4)))
    source = VideoText(path=str(clips / "twice.jsonl"), video=drawn(4), held_out_every=3)

    def numbers(seed):
        data = build(source, data={"seed": seed})
        return [shown(data[row])[0] for row in range(len(data))], shown(data.held_out[0])[0]

    own, held_out = numbers(1)
    assert own == numbers(1)[0]
    assert own[0] != own[1], "the same clip in another document"
    assert own != numbers(2)[0]
    assert held_out == numbers(2)[1] == [0, 5, 10, 15], "what is held out is not drawn"


class Hour:
    """A reader of an hour at 25 frames a second, whose frames are large."""

    def probe(self, file):
        times = np.arange(90_000) / 25
        return Clip(720, 1280, times, np.arange(90_000) % 250 == 0, 3600.0)

    def frames(self, file, clip, numbers):
        return [np.full((clip.height, clip.width, 3), number % 251, np.uint8) for number in numbers]


def clip_source(job, reader, sampling, **keys):
    seen, tokenizer = image_input(job), Bytes().build(None, list)
    return attrs.evolve(Frames(sampling=sampling, reader=PyAV(), **keys).build(seen, tokenizer), reader=reader)


def test_memory_is_that_of_a_few_frames_whatever_the_clip(make_job, clips):
    source = clip_source(make_job(VideoText(path=str(clips))), Hour(), Uniform(max_frames=48, min_frames=48))
    visual = source.visual(FileImage("hour"), Span(), None)
    tracemalloc.start()
    patches = visual.read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(patches) == visual.measure().patches == 48
    assert 3 * clips_module.BYTES_AT_ONCE < 48 * 3 * 720 * 1280
    assert peak < 1.5 * clips_module.BYTES_AT_ONCE


def test_an_hour_costs_what_its_frames_cost(make_job, tmp_path):
    pictures = [bar_code(number % 16, 16, 48) for number in range(3600)]
    write_clip(tmp_path / "hour.mp4", pictures, range(3600), options={"g": "10", "preset": "ultrafast"})
    reader = PyAV().build()
    job = make_job(VideoText(path=str(tmp_path)))
    source = clip_source(job, reader, Uniform(max_frames=4, min_frames=4))
    visual = source.visual(FileImage(str(tmp_path / "hour.mp4")), Span(1800.0, 1830.0), None)
    assert visual.choice().times.tolist() == pytest.approx([1800, 1810, 1820, 1829], abs=1)
    visual.read()
    assert reader.decoded <= 4 * 10


def gone(clips, folder):
    """Four clips with captions, of which the second is removed after they have been measured."""
    for name in "abcd":
        (folder / f"{name}.mp4").write_bytes((clips / f"{name}.mp4").read_bytes())
        (folder / f"{name}.txt").write_text(name)
    return folder / "b.mp4"


def test_a_clip_that_cannot_be_read_any_more_is_named_and_counted_and_ends_the_run_beyond_a_share(
    build, clips, tmp_path, caplog
):
    broken = gone(clips, tmp_path)
    source = VideoText(path=str(tmp_path), video=frames(2), unreadable="skip", max_unreadable=0.25)
    data = build(source)
    stops, few = (build(attrs.evolve(source, **keys)) for keys in ({"unreadable": "stop"}, {"max_unreadable": 0.2}))
    assert [int(data[row]["broken_documents"]) for row in range(4)] == [0] * 4
    broken.unlink()
    rows = [data[row] for row in range(4)]
    assert [int(row["broken_documents"]) for row in rows] == [0, 1, 0, 0]
    assert not lacks(caplog.text, f"{tmp_path}/b", f"'{broken}'", "No such file or directory")
    assert (rows[1]["labels"] == -100).all()
    with pytest.raises(DataError, match=naming(f"{tmp_path}/b", f"'{broken}'", 'unreadable = "skip"')):
        stops[1]
    with pytest.raises(DataError, match=naming("1 of 4", "max_unreadable = 0.2", f"{tmp_path}/b", f"'{broken}'")):
        few[1]


def test_a_clip_without_a_header_is_named_before_the_first_step(build, clips, tmp_path):
    gone(clips, tmp_path).write_bytes(b"no clip")
    source = VideoText(path=str(tmp_path), video=frames(2))
    with refuses("data.sources.0.unreadable", "1 of 4", f"{tmp_path}/b", f"'{tmp_path}/b.mp4'"):
        build(source)
    data = build(attrs.evolve(source, unreadable="skip", max_unreadable=0.25))
    assert len(data) == 3
    assert not lacks(data.describe(), 3, 1)
