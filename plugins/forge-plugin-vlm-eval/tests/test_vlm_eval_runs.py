"""Evaluations of a run: against the model itself, under every layout, and what is refused."""

from __future__ import annotations

import hashlib
import json
import math
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from forge_core.contracts.errors import DataError, ForgeError, JobError
from forge_core.contracts.model import Model
from forge_core.data.reading import collate
from forge_core.engine.build import build_context
from forge_core.engine.evaluation import evaluate
from forge_kit.nn.generation import WholeModel, join
from forge_plugin_images import ImageText
from forge_plugin_text import Bytes, Text
from forge_plugin_text.packing import BestFit
from forge_plugin_vision import MultimodalRope
from forge_plugin_vlm_eval import Anls, Captions, ExactMatch, MultipleChoice, captions
from forge_plugin_vlm_eval.answer_evaluation import GeneratedAnswers
from forge_plugin_vlm_eval.generation import check_generates
from forge_plugin_vlm_eval.question_rows import Asked, questions_for
from forge_testing import Numbers
from forge_testing.images import LANGUAGE, tiny_model
from forge_testing.laws import Case, layout_law
from forge_testing.refusals import at, check_problems, naming, problems_of, refuses
from forge_testing.runs import tiny_run

CHOICES = ["red", "green", "a very deep blue"]
COLOURS = ("red", "green", "blue", "white", "black")
QUESTIONS = [
    {"question": "which?" * (number % 3), "choices": CHOICES, "right": number % 3, "all": ["a", "red", "bb"]}
    for number in range(17)
]
"""Of several lengths."""
# Initial weights that are far from uniform guesses
MODEL = attrs.evolve(tiny_model(8, 16), language=attrs.evolve(LANGUAGE, vocab_size=258, layers=2, init_std=0.5))


class Said(GeneratedAnswers):
    """Logs a digest of what the model has said."""

    def scores(self, said, right):
        return {"said": int.from_bytes(hashlib.sha256(repr(said).encode()).digest()[:6])}


def write_records(folder, records, name="questions"):
    """Write a file with a record for each of these: a coloured image, a question, and the keys given."""
    lines = []
    for number, record in enumerate(records):
        colour = COLOURS[number % len(COLOURS)]
        Image.new("RGB", (16, 8), colour).save(folder / f"{colour}.png")
        lines.append(json.dumps({"image": f"{colour}.png", "question": "which?", "text": colour, **record}))
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def settings_of(path):
    """Settings of a job that trains on a file and evaluates its questions."""
    source = {"path": path, "prompt": "question"}
    choices = MultipleChoice(source=ImageText(**source), options="choices", answer="right")
    return {
        "model": MODEL,
        "data": {"sources": (ImageText(**source, held_out_every=2),), "tokenizer": Bytes()},
        "evaluations": {
            "choices": choices,
            "said": Said(max_tokens=6),
            "anls": Anls(source=ImageText(**source), references="all", max_tokens=6, threshold=1.0),
            "match": ExactMatch(max_tokens=2, prefix="vqa"),
        },
        "seq_len": 40,
        "global_batch_size": 8,
        "precision": "fp64",
    }


@pytest.fixture
def write(tmp_path):
    return partial(write_records, tmp_path)


@pytest.fixture
def changes(write):
    return settings_of(write(QUESTIONS))


def check_numbers(run, options):
    """Choices and greedy tokens are those of whole forward passes, without padding, cache or batch.

    Returns the bits of each right choice and the answers.
    """
    metrics = evaluate(run, 0)
    tokenizer, fields = run.context.tokenizer, run.job.model.batch_fields(run.job)

    def log_probabilities(ids, entries):
        batch = collate([{"input_ids": np.array(ids), "labels": np.zeros(len(ids), int), **entries}], fields)
        with torch.no_grad():
            return run.model.head.logits(run.model(batch))[0].log_softmax(-1)

    questions = run.evaluations["choices"].questions
    right, per_byte, bits = [], [], []
    for asked in questions.asked:
        entries, prompt = asked.question.entries(questions.row(asked)), asked.question.prompt.tolist()
        number = asked.values["right"]
        values = []
        for text in options:
            tokens = tokenizer.encode(text)
            table = log_probabilities([*prompt, *tokens[:-1]], entries)[len(prompt) - 1 :]
            values.append(sum(float(table[place, token]) for place, token in enumerate(tokens)))
        right.append(np.argmax(values) == number)
        per_byte.append(np.argmax([value / len(text) for value, text in zip(values, options, strict=True)]) == number)
        bits.append(-values[number] / math.log(2) / len(options[number]))
    assert metrics["choices/acc"] == np.mean(right)
    assert metrics["choices/acc_per_byte"] == np.mean(per_byte)
    assert metrics["choices/bits_per_byte"] == pytest.approx(np.mean(bits), rel=1e-9)

    said = []
    questions = run.evaluations["said"].questions
    for asked in questions.asked:
        entries, ids = asked.question.entries(questions.row(asked)), asked.question.prompt.tolist()
        start = len(ids)
        while len(ids) < start + 6:
            token = int(log_probabilities(ids, entries)[-1].argmax())
            if token == tokenizer.end_of_text:
                break
            ids.append(token)
        said.append(tokenizer.decode(ids[start:]))
    assert metrics["said/said"] == Said().scores(said, [])["said"]
    return bits, said


@pytest.mark.parametrize("packing", [False, True])
def test_numbers_are_those_of_the_model(changes, packing, tmp_path):
    keys = {"data": changes["data"] | {"packing": BestFit()}} if packing else {}
    # Behind an image, positions of mrope depend on how many images a row is said to have had.
    attention = attrs.evolve(MODEL.language.attention, rope=MultimodalRope(sections=(1, 1, 0)))
    language = attrs.evolve(MODEL.language, attention=attention)
    keys |= {"model": attrs.evolve(tiny_model(8, 16, images_per_sequence=3), language=language)}
    evaluations = {name: changes["evaluations"][name] for name in ("choices", "said")}
    run = tiny_run(tmp_path, **changes | keys | {"evaluations": evaluations})
    bits, said = check_numbers(run, CHOICES)
    assert len(set(bits)) > 5
    assert len(set(said)) > 2
    asked = run.evaluations["choices"].questions.asked
    assert len(asked) == len(QUESTIONS)
    assert (len({one.index for one in asked}) < len(QUESTIONS)) == packing  # a packed row has several


def test_clips_are_asked_like_images(changes, tmp_path):
    """With times as text between their frames, and two captions each."""
    pytest.importorskip("av")
    from forge_plugin_images.video import Frames, Uniform, VideoText
    from forge_testing.clips import bar_code, write_clip

    lines = []
    for number in range(3):
        pictures = [bar_code(5 * number + frame, 16, 48) for frame in range(5)]
        write_clip(tmp_path / f"{number}.mp4", pictures, np.arange(5) / 4)
        lines.append({"video": f"{number}.mp4", "text": "yes", "q": "?", "right": number % 2})
    (tmp_path / "clips.jsonl").write_text("\n".join(map(json.dumps, lines)))
    video = Frames(sampling=Uniform(fps=8, max_frames=3, min_frames=1), timestamps="text")
    source = VideoText(path=str(tmp_path / "clips.jsonl"), video=video, prompt="q")
    seen = tiny_model(16, 48, any_size=True, patches_per_sequence=48)
    evaluations = {
        "choices": MultipleChoice(source=source, options=("yes", "no way"), answer="right"),
        "said": Said(source=source, max_tokens=6),
    }
    keys = {"model": attrs.evolve(seen, language=MODEL.language), "evaluations": evaluations, "seq_len": 96}
    bits, _ = check_numbers(tiny_run(tmp_path, **changes | keys), ("yes", "no way"))
    assert len(set(bits)) == 3


def metrics_of(folder, layout):
    """What the evaluations measure, with a cache that ranks share."""
    if not layout or dist.get_rank() == 0:
        write_records(folder, QUESTIONS)
    if layout:
        dist.barrier()
    # Ranks are started by any test, without the fixtures of this module.
    with mock.patch.dict(os.environ, FORGE_CACHE=str(folder / "cache")):
        return evaluate(tiny_run(folder, **settings_of(str(folder / "questions.jsonl")), **layout), 0)


def same_metrics(ranks, alone):
    assert {name.split("/")[0] for name in alone} == {"eval", "choices", "said", "anls", "vqa"}
    assert 0 < alone["anls/anls"] < 1
    assert ranks == [pytest.approx(alone, rel=1e-9)] * len(ranks)


test_layouts = layout_law(Case("vlm-eval", observe=metrics_of, compare=same_metrics, layouts=("fsdp2", "pp2", "cp2")))


def test_a_run_asks_before_its_first_step_what_its_files_say_and_logs_the_metrics(make_job, train, write, changes):
    job = make_job(**changes | {"steps": 2, "eval": {"interval": 1}})
    lines = [json.loads(line) for line in (train(job).folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "vqa/exact_match" in line] == [1, 2]
    good = {"choices": CHOICES, "right": 1, "all": ["a"] * 4}
    cases = [
        ({"choices": CHOICES[:1]}, "choices", r"broken.jsonl:2: 'choices' holds \['red'\]; at least two are needed"),
        ({"choices": ["red", 2]}, "choices", r"broken.jsonl:2: 'choices' holds .*, which is no list of texts"),
        ({"right": 3}, "choices", r"broken.jsonl:2: 'right' is 3, not a number from 0 to 2"),
        ({"right": "blue"}, "choices", r"broken.jsonl:2: 'right' is 'blue', which is 0 of the choices"),
        ({"right": None}, "choices", r"broken.jsonl:2: no key 'right', but 'image', 'question', 'text', 'choices', "),
        ({"all": 7}, "match", r"broken.jsonl:2: 'all' holds '7', which is no list of texts"),
        ({"all": ["a"] * 3}, "match", r"'all' has 3 answers, and with fewer than 4 no answer is worth 1"),
    ]
    for fault, name, message in cases:
        source = ImageText(path=write([good, good | fault], "broken"), prompt="question")
        evaluations = {
            "choices": MultipleChoice(source=source, options="choices", answer="right"),
            "match": ExactMatch(source=source, references="all", agreement="vqa"),
        }
        broken = make_job(**changes | {"evaluations": {name: evaluations[name]}, "job": {"name": "broken"}})
        with pytest.raises(JobError, match=message):
            train(broken)
    assert not (Path(broken.job.output) / "broken" / "metrics.jsonl").exists(), "refused before the model is built"


def test_choices_that_all_questions_share_are_compared_with_the_learned_text(changes, tmp_path):
    evaluation = MultipleChoice(options=("red", "green", "blue", "white", "black"), metrics=("acc",))
    metrics = evaluate(tiny_run(tmp_path, **changes | {"evaluations": {"colour": evaluation}}), 0)
    assert {name for name in metrics if "colour" in name} == {"colour/acc", "colour/acc_stderr"}
    missing = MultipleChoice(options=("red", "green"))
    run = tiny_run(tmp_path, **changes | {"evaluations": {"colour": missing}})
    with refuses("", "row 1", "'blue'", 0, "['red', 'green']"):
        evaluate(run, 0)
    long = MultipleChoice(options=("red", "green", "blue", "white", "black", "x" * 40))
    with refuses("", "row 0", "41 positions", "train.seq_len is 40"):
        evaluate(tiny_run(tmp_path, **changes | {"evaluations": {"colour": long}}), 0)


def test_what_a_check_refuses(make_job, changes, monkeypatch):
    found = captions.find_spec
    monkeypatch.setattr(captions, "find_spec", lambda name: None if name == "pycocoevalcap" else found(name))
    monkeypatch.setattr(captions.shutil, "which", lambda name: None)
    evaluations = {
        "a": ExactMatch(references="answers"),
        "b": ExactMatch(agreement="vqa"),
        "c": Captions(words="ptb"),
        "d": MultipleChoice(options=("yes", " ")),
        "e": MultipleChoice(options="options"),
    }
    of_records = ("records", "[evaluations.NAME.source]")
    check_problems(
        problems_of(make_job(**changes | {"evaluations": evaluations})),
        at("evaluations.a.references", "'answers'", *of_records),
        at("evaluations.b.agreement", "'vqa'", "references"),
        at("evaluations.c", "CIDEr", 'pip install "forge-plugin-vlm-eval[captions]"'),
        at("evaluations.c.words", "'ptb'", "java", "'treebank'"),
        at("evaluations.d.options", "['yes', ' ']"),
        at("evaluations.e.options", "'options'", *of_records),
    )
    check_problems(
        problems_of(make_job(evaluations={"a": ExactMatch()}, data={"sources": (Numbers(),)})),
        at("evaluations.a", "TinyModel", "images"),
        at("evaluations.a", "[data.tokenizer]"),
    )


def test_a_source_that_asks_nothing_is_refused(changes, tmp_path):
    (tmp_path / "text.txt").write_text("no images")
    (tmp_path / "none.jsonl").write_text("")
    stream, empty = Text(path=str(tmp_path / "text.txt")), ImageText(path=str(tmp_path / "none.jsonl"))
    for source, facts in (
        (stream, ["held_out_split", "held_out_every"]),
        (empty, ["no document"]),
        (Numbers(), ["learned text"]),
    ):
        evaluations = {"asked": ExactMatch(source=source)}
        with refuses("evaluations.asked", *facts):
            tiny_run(tmp_path, **changes | {"evaluations": evaluations})


def test_an_evaluation_from_python_is_refused_without_a_tokenizer(make_job, catalog):
    job = make_job(model=MODEL, data={"sources": (Numbers(),)})
    with refuses("", "[data.tokenizer]"):
        ExactMatch().build(build_context(job, catalog, None))


def test_rows_whose_images_cannot_be_told_apart_are_named(changes, tmp_path):
    run = tiny_run(tmp_path, **changes | {"evaluations": {}})
    row = dict(ImageText(path=changes["data"]["sources"][0].path).build(run.context)[0])
    grids = row["grids"] * 2
    with pytest.raises(JobError, match=naming("row 0", "take 16", 2)):
        questions_for(ExactMatch(), run.context, [{**row, "grids": grids}])


def test_a_value_of_a_record_that_is_not_known_is_named():
    with pytest.raises(DataError, match=naming("a.jsonl:3", "'right'")):
        Asked(0, None, "", "a.jsonl:3").value("right")
    assert Asked(0, None, "", "", {"right": 0}).value("right") == 0


@pytest.mark.parametrize(("replicate", "is_refused"), [(1, True), (2, False)])
def test_a_model_that_stages_have_split_is_asked_if_its_ranks_generate_together(replicate, is_refused):
    network = Model()
    network.new_cache = network.decode = lambda *_: None
    layout = SimpleNamespace(replicate=replicate, world_size=2)
    with pytest.raises(ForgeError, match=naming("multiple_choice", "together")) if is_refused else nullcontext():
        check_generates(network, layout)
    join(network, WholeModel(network))
    check_generates(network, layout)


def test_captions_have_cider_among_each_other(changes, write, tmp_path):
    pytest.importorskip("pycocoevalcap")
    source = ImageText(path=write([{"all": ["a cat", "a dog"]}] * 3))
    asked = {"captions": Captions(source=source, references="all", max_tokens=6)}
    metrics = evaluate(tiny_run(tmp_path, **changes | {"evaluations": asked}), 0)
    assert metrics["captions/cider"] == 0 == metrics["captions/cider_stderr"]
    one = {"captions": Captions(source=ImageText(path=write([{}], "one")))}
    with pytest.raises((JobError, ForgeError), match=naming("CIDEr", "one question")):
        evaluate(tiny_run(tmp_path, **changes | {"evaluations": one}), 0)


def test_a_model_that_cannot_generate_is_refused_before_the_first_step(changes, make_job, train, monkeypatch):
    from forge_plugin_vlm_eval import generation

    monkeypatch.setattr(generation, "Generates", type("Never", (), {}))
    job = make_job(**changes | {"steps": 1})
    with pytest.raises(ForgeError, match=naming("new_cache and decode")):
        train(job)
    assert "loss" not in (Path(job.job.output) / "run" / "metrics.jsonl").read_text()
