"""Evaluation `answers`."""

from __future__ import annotations

import json

import attrs
import numpy as np
import pytest
from PIL import Image

from forge_core import Trainer
from forge_core.contracts.layout import Layout
from forge_plugin_generate.generate import Sampling
from forge_plugin_images import Answers, RenderedText
from forge_plugin_images.answering import Answer, answered, edit_distance
from forge_plugin_images.gallery import pixels_of
from forge_plugin_images.patches import patches_of
from forge_plugin_images.testing import LANGUAGE, tiny_model
from forge_plugin_text.bytes import ByteTokenizer
from forge_plugin_vision import ImageFormat
from forge_testing import job_problems, tiny_job
from forge_testing.layouts import LAYOUTS
from forge_testing.processes import run_on_ranks


@pytest.mark.parametrize(("one", "other", "distance"), [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3)])
def test_the_edit_distance(one, other, distance):
    assert edit_distance(one, other) == edit_distance(other, one) == distance


def test_letters_are_relative_to_the_longer_text():
    answer = Answer(row={}, expected="abcd", said="abxdef", bits=0.0)
    assert answer.letters == pytest.approx(1 - 3 / 6)
    assert not answer.is_right


def test_patches_become_the_image_again():
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3)).astype(np.uint8)
    form = ImageFormat(patch=4, frames=2)
    patches = np.concatenate([patches_of(pixels, form), np.zeros((3, form.values), np.uint8)])
    assert (pixels_of(patches, np.array([1, 2, 3]), form) == pixels).all()


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
    problems = job_problems(tiny_job(str(tmp_path), catalog, evaluations={"answers": Answers()}), 1)
    assert "evaluations.answers: TinyModel sees no images; leave this evaluation out" in problems
    assert any("words need a tokenizer" in problem for problem in problems)


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


@pytest.mark.parametrize("name", ["fsdp2", "tp2", "tp2_whole_sequences"])
def test_ranks_that_share_a_model_answer_as_one_process(name, make_job, catalog):
    language = attrs.evolve(LANGUAGE, vocab_size=258, init_std=0.5)
    changes = {"model": attrs.evolve(tiny_model(), language=language), "global_batch_size": 8, "precision": "fp64"}
    changes |= {"evaluations": {"said": Said(sequences=5, max_tokens=6)}, "steps": 1}
    data = RenderedText(held_out=6, length=(3, 4), text_size=(5, 5))
    one = Trainer(make_job(data, job={"name": "one"}, **changes), catalog=catalog).run().evaluation
    job = make_job(data, job={"name": name}, parallel=LAYOUTS[name].stages(catalog), **changes)

    def rank(number):
        return Trainer(job, catalog=catalog, echo=lambda text: None).run().evaluation

    for metrics in run_on_ranks(2, rank):
        assert metrics == pytest.approx(one, rel=1e-9, abs=1e-9)
    assert all(abs(one[f"bits/{number}"]) > 1e-6 for number in range(5))  # images count


@pytest.mark.parametrize(("split", "refused"), [({"pp": 2}, "pp"), ({"cp": 2}, "cp"), ({"shard": 2, "tp": 2}, "")])
def test_layouts_that_cannot_have_it_are_refused(make_job, split, refused):
    job = make_job(RenderedText())
    messages = [problem.message for problem in Answers().problems(job, Layout(replicate=2, **split))]
    assert [f"images cannot be answered where {refused} divides" in message for message in messages] == [True] * bool(
        refused
    )
