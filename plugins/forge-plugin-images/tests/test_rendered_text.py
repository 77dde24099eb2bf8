"""Dataset `rendered_text`: words in images, exact labels, held-out words and fonts."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
from PIL import ImageFont

from forge_core import JobError
from forge_plugin_images import RenderedText
from forge_plugin_images.fonts import load_font
from forge_plugin_text import Bytes
from forge_plugin_vision import IMAGE
from forge_testing import job_problems
from forge_testing.images import tiny_model
from forge_testing.refusals import at, check_problems, problems_of, refuses
from forge_testing.suites import DatasetSuite

WORDS = ["red", "green", "blue", "black", "white", "grey", "pink", "brown", "cyan", "lime"]
END = 256


@pytest.fixture
def words(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("\n".join(WORDS))
    return str(path)


class TestRenderedText(DatasetSuite):
    has_images = True
    job = {"model": tiny_model(8, 24), "seq_len": 16, "data": {"tokenizer": Bytes()}}

    def make(self, folder):
        (folder / "words.txt").write_text("\n".join(word for word in WORDS if len(word) < 5))
        return RenderedText(words=str(folder / "words.txt"), text_size=(6, 6), advance=6, held_out=2, drawings=3)


def test_a_row_is_the_image_then_the_word_and_the_image_predicts_its_first_letter(build, words):
    data = build(RenderedText(words=words, text_size=(6, 6), held_out=2))
    row, word = data[0], data.word(0).encode()
    assert list(row["input_ids"][: 6 + len(word) + 1]) == [IMAGE] * 6 + [*word, END]
    assert list(row["labels"][: 6 + len(word)]) == [-100] * 5 + [*word, END]
    assert (row["labels"][6 + len(word) :] == -100).all()
    assert row["grids"].tolist() == [[1, 1, 6]]


def test_patches_are_those_of_the_drawn_image(build, words):
    data = build(RenderedText(words=words, text_size=(6, 6), noise=5, held_out=2))
    pixels, patches = data.pixels(3), data[3]["patches"].reshape(6, 3, 8, 8)
    assert pixels.shape == (8, 48, 3)
    assert len(np.unique(pixels)) > 10
    for column in range(6):
        assert (patches[column].transpose(1, 2, 0) == pixels[:, 8 * column : 8 * column + 8]).all()


def test_each_drawing_of_a_word_is_another_and_each_word_has_its_share(build, words):
    keys = {"words": words, "text_size": (5, 7), "placement": "anywhere", "jitter": 1}
    data = build(RenderedText(**keys, drawings=4, held_out=2), model=tiny_model(16, 48))
    assert (len(data), len(data.held_out)) == (8 * 4, 2)
    drawn = [data.pixels(index).tobytes() for index in range(len(data)) if data.word(index) == data.word(0)]
    assert len(drawn) == 4 == len(set(drawn))


def test_no_held_out_word_is_trained_on_and_a_longer_list_holds_out_nearly_the_same(build, words, tmp_path):
    data = build(RenderedText(words=words, text_size=(6, 6), held_out=3))
    held = {data.held_out.word(index) for index in range(len(data.held_out))}
    assert held.isdisjoint(data.word(index) for index in range(len(data)))
    assert len(held) == 3
    (tmp_path / "more.txt").write_text("\n".join([*WORDS, "zebra"]))
    more = build(RenderedText(words=str(tmp_path / "more.txt"), text_size=(6, 6), held_out=3)).held_out
    assert len({more.word(index) for index in range(3)} & held) >= 2


def test_the_standard_library_has_thousands_of_words(build):
    data = build(RenderedText(text_size=(6, 6), length=(4, 8)))
    found = {data.word(index) for index in range(len(data) // 20)}
    assert len(found) > 5000
    assert {len(word) for word in found} <= {4, 5, 6, 7, 8}


def test_held_out_fonts_draw_held_out_words_only(build, words):
    keys = {"words": words, "text_size": (6, 6), "held_out": 3}
    plain, other = build(RenderedText(**keys)), build(RenderedText(**keys, held_out_fonts=("DejaVuSerif",)))
    assert (plain.pixels(0) == other.pixels(0)).all()
    assert (plain.held_out.pixels(0) != other.held_out.pixels(0)).any()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"size": (10, 48)}, r"size: \[10, 48\]: height and width must be multiples of 8 pixels"),
        ({"size": (8, 40)}, r"size: \[8, 40\], but the encoder takes images of \[8, 48\]; leave size out"),
        ({"held_out": 10}, "held_out: 10, but .* has 10 different words"),
        ({"words": "none.txt"}, "words: 'none.txt' cannot be read .*; it must be a text file with one word per line"),
        ({"fonts": (__file__,)}, r"fonts: '.*test_rendered_text.py' is no font that FreeType can read"),
        ({"fonts": ("Helvetika",)}, "fonts: 'Helvetika' is neither a file nor a font of matplotlib; .*DejaVuSans"),
    ],
)
def test_keys_that_do_not_fit_the_model_are_refused_when_the_job_is_checked(make_job, words, keys, message):
    problems = job_problems(make_job(RenderedText(**{"words": words, "held_out": 9, **keys})))
    assert len(problems) == 1
    assert re.search(message, problems[0]), problems


@pytest.mark.parametrize("columns", [12, 13])
def test_an_image_has_no_more_patches_than_a_sequence(make_job, build, words, columns):
    data = RenderedText(words=words, size=(8, 8 * columns), text_size=(6, 6), held_out=2)
    model = tiny_model(any_size=True, patches_per_sequence=12)
    facts = (f"8 x {8 * columns} pixels", "13 patches", "model.vision.patches_per_sequence = 12")
    found = problems_of(make_job(data, model=model))
    if columns == 12:
        assert found == []
        assert build(data, model=model)[0]["grids"].tolist() == [[1, 1, 12]]
    else:
        check_problems(found, at("data.sources.0.size", *facts))
        with refuses("data.sources.0.size", *facts):
            build(data, model=model)


def test_words_without_a_tokenizer_are_refused(make_job, words):
    data = RenderedText(words=words, held_out=2)
    job = make_job(data)
    check_problems(
        problems_of(attrs.evolve(job, data=attrs.evolve(job.data, tokenizer=None))),
        at("data.sources.0", "[data.tokenizer]"),
    )
    with refuses("", "[data.tokenizer]"):
        data.build(SimpleNamespace(tokenizer=None))


def test_fonts_that_need_what_is_not_installed_are_refused(make_job, words, monkeypatch):
    load_font.cache_clear()
    monkeypatch.setattr("PIL.ImageFont.load_default", lambda size: ImageFont.ImageFont())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    job = make_job(RenderedText(words=words, held_out=2, fonts=("built-in", "DejaVuSans")))
    check_problems(
        problems_of(job),
        at("data.sources.0.fonts", "'built-in'", "FreeType"),
        at("data.sources.0.fonts", "'DejaVuSans'", "pip install matplotlib"),
    )


def test_a_model_that_sees_no_images_is_refused(make_job, words):
    job = make_job(RenderedText(words=words, held_out=2), model=tiny_model().language)
    check_problems(problems_of(job), at("data.sources.0", "Transformer", 'type = "vision_language"'))


@pytest.mark.parametrize(
    ("keys", "changes", "message"),
    [
        ({}, {"seq_len": 8}, r"needs \d+ positions, 6 for the image and \d for '\w+'; train.seq_len is 8"),
        ({"text_size": (30, 30)}, {}, r"text_size: letters of 30 pixels need \d+ pixels .* images are 8 high"),
        ({"advance": 40}, {}, r"text_size: none of \d words fits into the 48 pixels of an image"),
        ({"held_out": 10}, {}, "held_out: 10, but .* has 10 different words"),
    ],
)
def test_what_has_no_room_is_refused(build, words, keys, changes, message):
    with pytest.raises(JobError, match=message):
        build(RenderedText(**{"words": words, "text_size": (6, 6), "held_out": 2, **keys}), **changes)
