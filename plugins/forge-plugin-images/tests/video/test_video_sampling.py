"""Samplings against closed forms, and against the video processors of published models."""

from __future__ import annotations
import __future__

import ast
import importlib.util
import math
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_plugin_images.resize import NativeResize
from forge_plugin_images.video import Clip, Fps, Middle, Scene, Uniform
from forge_plugin_vision import ImageFormat
from forge_testing.refusals import at, check_problems

ROOM = 10_000
SAMPLINGS = (Uniform, Fps, Middle, Scene)


@pytest.mark.parametrize(
    ("form", "least"),
    [(ImageFormat(patch=4, grid=(2, 3)), 6), (ImageFormat(patch=4), 5), (ImageFormat(patch=4, multiple=3), 9)],
)
def test_the_smallest_frame_is_the_grid_or_what_is_joined_or_the_key(form, least):
    assert NativeResize(min_patches=5).smallest(form) == least


def steady(frames, rate=25.0, keys=(0,), start=0.0):
    """A clip of a constant rate."""
    times = start + np.arange(frames) / rate
    return Clip(32, 96, times, np.isin(np.arange(frames), keys), frames / rate)


@cache
def processor(model):
    """`sample_frames` of a video processor of transformers, whose module needs torchvision for other things."""
    [folder] = importlib.util.find_spec("transformers").submodule_search_locations
    source = Path(folder, "models", model, f"video_processing_{model}.py").read_text()
    [function] = [node for node in ast.walk(ast.parse(source)) if getattr(node, "name", "") == "sample_frames"]
    names = {"math": math, "torch": torch, "np": np}
    exec(compile(ast.Module([function], []), model, "exec", __future__.annotations.compiler_flag), names)
    return names["sample_frames"]


CLIPS = [(frames, rate) for frames in (8, 9, 25, 100, 101, 333, 750, 2000) for rate in (24.0, 25.0, 30.0)]


def test_fps_chooses_the_frames_of_qwen2_5_vl_and_molmo2():
    for frames, rate in CLIPS:
        metadata = SimpleNamespace(total_num_frames=frames, fps=rate, duration=frames / rate)
        settings = SimpleNamespace(fps=2, num_frames=None, temporal_patch_size=2, min_frames=4, max_frames=32)
        expected = processor("qwen2_vl")(settings, metadata, fps=2)
        assert Fps(max_frames=32, multiple=2).choose(steady(frames, rate), ROOM, None) == expected.tolist()
        expected = processor("molmo2")(SimpleNamespace(max_fps=2.0, num_frames=384), metadata, fps=2)
        assert Fps(min_frames=1, max_frames=384).choose(steady(frames, rate), ROOM, None) == expected.tolist()


@pytest.mark.parametrize(("frames", "rate"), [(29, 100.0), (57, 100.0), (9, 30.0), (35, 29.97)])
def test_fps_at_the_rate_of_a_clip_chooses_every_frame_though_its_duration_is_not_exact(frames, rate):
    assert Fps(fps=rate, min_frames=1, max_frames=64).choose(steady(frames, rate), ROOM, None) == list(range(frames))


def test_uniform_chooses_the_frames_of_qwen3_vl_where_both_round_to_one_number():
    compared = 0
    for frames, rate in CLIPS:
        metadata = SimpleNamespace(total_num_frames=frames, fps=rate)
        expected = processor("qwen3_vl")(SimpleNamespace(fps=2, min_frames=4, max_frames=32), metadata)
        chosen = Uniform(fps=2.0, max_frames=32).choose(steady(frames, rate), ROOM, None)
        if round(frames / rate * 2) == int(frames / rate * 2) or len(chosen) in (4, 32):
            halves = (np.arange(len(chosen)) * (frames - 1) / (len(chosen) - 1)) % 1 == 0.5
            # Half-way between two frames, numpy takes the even one and this the earlier one
            assert np.array_equal(np.array(chosen)[~halves], expected[~halves])
            compared += 1
    assert compared > 12


@pytest.mark.parametrize(("frames", "count"), [(250, 10), (100, 4), (1000, 32), (7, 4), (3, 3), (1, 1)])
def test_uniform_and_middle_have_closed_forms(frames, count):
    """One frame a second of 25, between 4 and 32; a clip of fewer frames gives all of them."""
    line = np.linspace(0, frames - 1, count).round()
    assert Uniform(max_frames=32).choose(steady(frames), ROOM, None) == line.tolist()
    centres = [math.floor((i + 0.5) * frames / count) for i in range(count)]
    assert Middle(max_frames=32).choose(steady(frames), ROOM, None) == centres


def test_times_count_and_not_numbers():
    """A clip that shows its first frame for 10 s, and then 100 others in 4 s."""
    times = np.concatenate([[3.0], 13.0 + np.arange(100) / 25])
    clip = Clip(32, 96, times, times == 3.0, 14.0)
    assert Fps(fps=0.5).choose(clip, ROOM, None) == [0, 1, 2, 3, 4, 5, 51]
    assert Uniform(fps=2 / 14, min_frames=2).choose(clip, ROOM, None) == [0, 100]
    assert Middle(fps=2 / 14, min_frames=2).choose(clip, ROOM, None) == [0, 13]


clips = st.builds(
    lambda steps, keys, start: Clip(
        32, 96, start + np.cumsum([0.0, *steps]), np.isin(np.arange(len(steps) + 1), [0, *keys]), sum(steps) + 0.04
    ),
    st.lists(st.floats(0.01, 9.0), max_size=60),
    st.lists(st.integers(0, 60)),
    st.floats(-2.0, 1000.0),
)


@given(clips, st.sampled_from(SAMPLINGS), st.integers(1, 70), st.integers(1, 3), st.integers(1, 9), st.integers(0, 99))
def test_every_choice_is_ascending_within_its_bounds_and_repeatable(clip, kind, budget, multiple, least, seed):
    sampling = kind(min_frames=least, max_frames=least + 20, multiple=multiple, jitter=True)
    chosen = sampling.choose(clip, budget, None)
    drawn = sampling.choose(clip, budget, Random(seed))
    assert drawn == sampling.choose(clip, budget, Random(seed))
    assert len(drawn) == len(chosen)  # so that a row can be planned before it is drawn
    for numbers in (chosen, drawn):
        assert numbers == sorted(set(numbers))
        assert 0 <= numbers[0] <= numbers[-1] < len(clip.times)
    most = min(budget, least + 20, len(clip.times))
    assert len(chosen) <= most
    assert len(chosen) % multiple == 0 or len(chosen) == most < multiple
    assert len(chosen) >= min(least, most // multiple * multiple)


@pytest.mark.parametrize("kind", [Uniform, Fps, Middle])
def test_jitter_draws_one_frame_from_each_part(kind):
    clip, sampling = steady(400, 25.0), kind(fps=1.0, jitter=True)
    parts = [[number // 25 for number in sampling.choose(clip, ROOM, Random(seed))] for seed in range(5)]
    assert parts == [list(range(16))] * 5
    drawn = [sampling.choose(clip, ROOM, Random(seed)) for seed in range(2)]
    assert drawn[0] != drawn[1]
    assert kind(fps=1.0).choose(clip, ROOM, Random(0)) == sampling.choose(clip, ROOM, None)


def test_scenes_begin_at_key_frames_that_are_no_refresh():
    """At most 50 frames between key frames: those at 90 and 97 are scenes, 50, 147 and 197 are as late as allowed."""
    clip = steady(200, keys=[0, 50, 90, 97, 147, 197])
    assert Scene(min_frames=3, max_frames=3).choose(clip, ROOM, None) == [45, 93, 148]
    assert Scene(min_frames=2, max_frames=2).choose(clip, ROOM, None) == [45, 148]  # the longest two
    # More: each goes to the scene whose frames stand for the longest
    assert Scene(min_frames=5, max_frames=5).choose(clip, ROOM, None) == [22, 67, 93, 122, 174]


def test_a_clip_of_regular_key_frames_is_one_scene():
    clip = steady(200, keys=range(0, 200, 12))
    assert Scene(fps=0.5).choose(clip, ROOM, None) == Middle(fps=0.5).choose(clip, ROOM, None)
    part = clip._replace(keys=np.zeros(200, bool))  # a part of a clip may have none
    assert Scene(fps=0.5).choose(part, ROOM, None) == Middle(fps=0.5).choose(part, ROOM, None)


def test_bounds_that_exclude_one_another_are_refused():
    check_problems(Uniform(min_frames=8, max_frames=4).problems(None, None), at("max_frames", 4, "min_frames 8"))
    problems = Fps(min_frames=1, max_frames=1, multiple=2).problems(None, None)
    check_problems(problems, at("max_frames", 1, "multiple 2"))
