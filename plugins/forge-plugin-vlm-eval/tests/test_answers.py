"""Evaluation `answers`."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from attrs import define, frozen
from PIL import Image

from forge_core import Trainer
from forge_core.contracts.components import DatasetComponent
from forge_core.contracts.errors import ForgeError
from forge_core.contracts.layout import Layout
from forge_plugin_generate.generate import Sampling
from forge_plugin_images import RenderedText
from forge_plugin_text import Bytes
from forge_plugin_text.bytes import ByteTokenizer
from forge_plugin_vision import VIDEO, ImageFormat
from forge_plugin_vlm_eval import Answers, row_answers
from forge_plugin_vlm_eval.gallery import draw_answers
from forge_plugin_vlm_eval.row_answers import Answer, answered
from forge_testing import tiny_job
from forge_testing.images import LANGUAGE, tiny_model
from forge_testing.layouts import LAYOUTS
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, naming, problems_of


@pytest.fixture
def make_job(tmp_path, catalog):
    """(dataset, further settings) -> a tiny job with a vision-language model and the tokenizer `bytes`."""

    def make(dataset, **changes):
        settings = {"model": tiny_model(), "seq_len": 24, **changes}
        data = {"sources": (dataset,), "tokenizer": Bytes()}
        return tiny_job(str(tmp_path / "runs"), catalog, data=data, **settings)

    return make


def test_letters_are_relative_to_the_longer_text():
    answer = Answer(row={}, expected="abcd", said="abxdef", bits=0.0)
    assert answer.letters == pytest.approx(1 - 3 / 6)
    assert not answer.is_right


@frozen(kw_only=True)
class Clips(DatasetComponent):
    """Clips of three frames, of which frame k of clip n is 10 n + k all over, and nothing to learn but a letter."""

    def build(self, context):
        return ClipRows(ClipRows(None))


@define
class ClipRows:
    held_out: Any
    bytes_per_token = None

    def __len__(self):
        return 4

    def __getitem__(self, index):
        levels = np.repeat(10 * index + np.arange(3, dtype=np.uint8), 6)
        ids, labels = np.full(24, 65), np.full(24, -100)
        ids[:18], labels[17] = VIDEO, 65
        return {
            "input_ids": ids,
            "labels": labels,
            "patches": np.tile(levels[:, None], 192),
            "grids": np.array([[3, 1, 6]]),
            "grid_seconds": np.ones(1, np.float32),
            "broken_documents": np.zeros((), np.int64),
        }


def test_clips_are_answered_with_their_first_frame_and_with_their_frames_shuffled_too(make_job, catalog, monkeypatch):
    """Where the "model" says the levels of the frames that it is shown."""

    def says_frames(model, prompts, *_, entries, **__):
        return [entries["patches"][number, ::6, 0].tolist() for number in range(len(prompts))]

    class Kept(Answers):
        def evaluate(self, context):
            answers.extend(answered(self, context))
            return super().evaluate(context)

    answers: list[Answer] = []
    monkeypatch.setattr(row_answers, "generate", says_frames)
    monkeypatch.setattr(ByteTokenizer, "decode", lambda self, ids: " ".join(map(str, ids)))
    model = tiny_model(8, 48, patches_per_sequence=18)
    job = make_job(Clips(), model=model, evaluations={"answers": Kept(shown=2)}, steps=1)
    folder = Trainer(job, catalog=catalog).run().folder
    assert [answer.said for answer in answers[:2]] == ["0 1 2", "10 11 12"]
    assert [answer.without_motion["still"] for answer in answers[:2]] == ["0 0 0", "10 10 10"]
    for number, answer in enumerate(answers[:4]):
        shown = answer.without_motion["shuffled"].split()
        assert sorted(map(int, shown)) == [10 * number + frame for frame in range(3)]
        assert shown != answer.said.split()
    [last] = [line for line in map(json.loads, (folder / "metrics.jsonl").open()) if "answers/exact" in line]
    assert [last[f"answers/{name}_exact"] for name in ("still", "shuffled")] == [0, 0]


def test_a_film_strip_has_all_frames_and_each_answer_in_its_colour(tmp_path):
    form, frames = ImageFormat(patch=8), np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]], np.uint8)
    patches = frames[:, :, None].repeat(64, 2).reshape(3, -1)
    row = {"patches": patches, "grids": np.array([[3, 1, 1]])}
    without = {"still": "ab", "shuffled": "b"}
    answer = Answer(row=row, expected="ab", said="ab", bits=1.0, without_motion=without)
    draw_answers([answer], form, tmp_path / "answers.png", 1)
    with Image.open(tmp_path / "answers.png") as picture:
        sheet = np.asarray(picture).astype(int)
    assert [sheet[100, x].tolist() for x in (10, 250, 490)] == frames.tolist()
    # Of text on white, the colour that is missing least is the brightest: here red or green.
    lines = [sheet[194 + 16 * line : 210 + 16 * line].mean((0, 1)) for line in (0, 2, 3)]
    assert ["red" if red > green else "green" for red, green, _ in lines] == ["green", "green", "red"]


@pytest.mark.parametrize(("shown", "numbers"), [(3, [0, 1, 3]), (5, [0, 1, 2, 3, 4]), (9, [0, 1, 2, 3, 4])])
def test_the_answers_that_are_drawn_are_evenly_spread(make_job, tmp_path, monkeypatch, shown, numbers):
    source = RenderedText(held_out=6, length=(3, 4), text_size=(5, 5))
    component = Answers(sequences=5, shown=shown, max_tokens=1)
    job, drawn = make_job(source, evaluations={"answers": component}), []
    answers = [SimpleNamespace(is_right=False, letters=0.0, without_motion={}, number=number) for number in range(5)]
    monkeypatch.setattr("forge_plugin_vlm_eval.row_answers.answered", lambda *given: answers)
    monkeypatch.setattr("forge_plugin_vlm_eval.gallery.draw_answers", lambda chosen, *given: drawn.extend(chosen))
    build = SimpleNamespace(layout=Layout(), folder=tmp_path)
    component.evaluate(SimpleNamespace(build=build, job=job, model=None, step=1))
    assert [answer.number for answer in drawn] == numbers


def test_a_run_logs_how_many_are_right_and_draws_them(make_job, catalog):
    evaluations = {"answers": Answers(sequences=5, shown=3, max_tokens=4)}
    job = make_job(RenderedText(held_out=6, length=(3, 4), text_size=(5, 5)), evaluations=evaluations, steps=2)
    folder = Trainer(job, catalog=catalog).run().folder
    [last] = [line for line in map(json.loads, (folder / "metrics.jsonl").open()) if "answers/exact" in line]
    assert 0 <= last["answers/exact"] <= last["answers/letters"] <= 1
    with Image.open(folder / "answers.png") as picture:
        assert picture.width > 900


def test_an_answer_ends_where_the_tokenizer_says_that_one_ends(make_job, catalog, monkeypatch):
    """Here before its first token, so that every right answer is empty, as is what the model says."""
    monkeypatch.setattr(ByteTokenizer, "stop_ids", lambda self: range(257), raising=False)
    evaluations = {"answers": Answers(sequences=5, shown=0, max_tokens=4)}
    job = make_job(RenderedText(held_out=6, length=(3, 4), text_size=(5, 5)), evaluations=evaluations, steps=1)
    folder = Trainer(job, catalog=catalog).run().folder
    [last] = [line for line in map(json.loads, (folder / "metrics.jsonl").open()) if "answers/exact" in line]
    assert last["answers/exact"] == 1


def test_a_job_that_cannot_have_it_is_refused(tmp_path, catalog):
    job = tiny_job(str(tmp_path), catalog, evaluations={"answers": Answers()})
    at_answers = [problem for problem in problems_of(job) if problem.path.startswith("evaluations")]
    check_problems(at_answers, at("evaluations.answers", "TinyModel"), at("evaluations.answers", "[data.tokenizer]"))


def test_ranks_that_share_a_model_and_cannot_generate_together_are_refused():
    context = SimpleNamespace(build=SimpleNamespace(layout=Layout(replicate=2, shard=2)), model=torch.nn.Linear(1, 1))
    with pytest.raises(ForgeError, match=naming("replicate 2", "shard 2", "answers")):
        Answers().evaluate(context)


class Said(Answers):
    """Logs the answers themselves: the bytes of each, its bits, and the size of the logits that it was drawn from."""

    def evaluate(self, context):
        sizes, draw = [], Sampling.draw

        def recorded(self, logits, generator=None):
            sizes.append(logits.square().sum().item())
            return draw(self, logits, generator)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sampling, "draw", recorded)
            answers = list(enumerate(answered(self, context)))
        said = {f"said/{number}": int.from_bytes(answer.said.encode()[:6]) for number, answer in answers}
        bits = {f"bits/{number}": answer.bits for number, answer in answers}
        return said | bits | {f"logits/{number}": size for number, size in enumerate(sizes)}


SHARED = ("fsdp2", "tp2", "tp2_whole_sequences", "pp2", "cp2")


def test_ranks_that_share_a_model_answer_as_one_process(make_job, catalog):
    language = attrs.evolve(LANGUAGE, vocab_size=258, layers=2, init_std=0.5)
    changes = {"model": attrs.evolve(tiny_model(), language=language), "global_batch_size": 8, "precision": "fp64"}
    changes |= {"evaluations": {"said": Said(sequences=5, max_tokens=6)}, "steps": 1}
    data = RenderedText(held_out=6, length=(3, 4), text_size=(5, 5))
    one = Trainer(make_job(data, job={"name": "one"}, **changes), catalog=catalog).run().evaluation
    layouts = {name: LAYOUTS[name].changes(catalog) for name in SHARED}
    jobs = {name: make_job(data, job={"name": name}, **changes, **layout) for name, layout in layouts.items()}

    def rank(number):
        return {
            name: Trainer(job, catalog=catalog, echo=lambda text: None).run().evaluation for name, job in jobs.items()
        }

    for of_rank in run_on_ranks(2, rank):
        for name, metrics in of_rank.items():
            assert metrics == pytest.approx(one, rel=1e-9, abs=1e-9), name
    assert all(abs(one[f"bits/{number}"]) > 1e-6 for number in range(5))  # images count
