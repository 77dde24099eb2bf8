"""Scores of answers, by hand and by the packages that define them."""

from __future__ import annotations

import random
import statistics

import pytest
from anls import anls_score

from forge_plugin_vlm_eval import Anls, ExactMatch
from forge_plugin_vlm_eval.captions import cider, ptb, treebank
from forge_plugin_vlm_eval.normalisation import normaliser, vqa, vqa_accuracy


@pytest.mark.parametrize(
    ("answer", "normalised"),
    [  # what `EvalAIAnswerProcessor` of MMF and lmms-eval makes of them
        ("The  two dogs.", "2 dogs"),
        ("NONE", "0"),
        ("dont know", "don't know"),
        ("couldntve", "couldntve"),
        ("couldnt've", "couldn't've"),
        ("T-shirt", "t shirt"),
        ("red/blue", "red blue"),
        ("red / blue", "red blue"),
        ("yes, sir", "yes sir"),
        ("1,000", "1000"),
        ("1,000-x", "1000x"),
        ("3.5", "3.5"),
        ("5.", "5"),
        ("a\nb\tan", "b"),
        ("what?", "what"),
    ],
)
def test_vqa_normalisation(answer, normalised):
    assert vqa(answer) == normalised


def test_other_normalisations():
    assert normaliser("case")(" The  Cat.\n") == "the cat."
    assert normaliser("none")(" A ") == " A "


def test_vqa_accuracy_leaves_each_person_out_in_turn():
    draw = random.Random(0)
    for _ in range(50):
        right = draw.choices("abc", k=draw.randint(4, 11))
        others = [right[:n] + right[n + 1 :] for n in range(len(right))]
        expected = statistics.mean(min(other.count("a") / 3, 1) for other in others)
        assert vqa_accuracy("a", right) == pytest.approx(expected, abs=1e-12)


def test_exact_match_counts_the_normalised_ones():
    said, right = ["The cat", "2", "no", "blue"], [["cat"], ["one", "two"], ["yes"], ["Blue."]]
    assert ExactMatch().scores(said, right) == {"exact_match": 0.75, "exact_match_stderr": pytest.approx(0.25)}
    assert ExactMatch(normalise="case").scores(said, right)["exact_match"] == 0
    people = [["cat"] * 2 + ["dog"] * 8]
    # Each of ten people is left out in turn: eight times two of the others agree, and twice one does.
    scores = ExactMatch(agreement="vqa", references="r").scores(["a cat"], people)
    assert scores == {"exact_match": pytest.approx((8 * 2 / 3 + 2 * 1 / 3) / 10)}


def test_anls_is_that_of_its_package():
    draw = random.Random(1)
    said = ["".join(draw.choices("aB c", k=draw.randint(0, 6))) for _ in range(200)]
    right = [["".join(draw.choices("AbC ", k=draw.randint(0, 6))) for _ in range(draw.randint(1, 3))] for _ in said]
    for threshold in (0.5, 0.8):
        expected = [anls_score(one, every, threshold) for one, every in zip(said, right, strict=True)]
        scores = Anls(threshold=threshold).scores(said, right)
        assert scores["anls"] == pytest.approx(statistics.mean(expected), abs=1e-12)
        assert scores["anls_stderr"] == pytest.approx(statistics.stdev(expected) / len(said) ** 0.5)
    # kitten, sitting: three edits of seven letters. An edit distance of one half counts nothing.
    assert Anls().scores(["Kitten"], [["sitting"]]) == {"anls": pytest.approx(4 / 7)}
    assert Anls().scores(["ab"], [["ac"]]) == {"anls": 0}


def test_cider_of_a_perfect_caption_is_ten_and_of_an_alien_one_zero():
    pytest.importorskip("pycocoevalcap")
    right = [["A man rides a wave."], ["Two dogs sleep in the sun."], ["A plate with a pizza on it."]]
    assert cider(["a man rides a wave", "cats", right[2][0]], right, "treebank") == pytest.approx([10, 0, 10])


def test_words_are_those_of_stanfords_tokenizer(monkeypatch):
    pytest.importorskip("pycocoevalcap")
    texts = [
        "A man's hat -- it doesn't fit.",
        'A sign that says "STOP" (in red).',
        "It's $5.00, or 10%!",
        "An A/C unit...",
    ]
    words = [
        "a man 's hat it does n't fit",
        "a sign that says stop -lrb- in red -rrb-",
        "it 's $ 5.00 or 10 %",
        "an a/c unit",
    ]
    assert treebank(texts) == words  # recorded from `ptb`, which needs Java
    import pycocoevalcap.tokenizer.ptbtokenizer as module

    class Java:
        def __init__(self, command, **options):
            assert command[0] == "java"
            self.words = "\n".join([*words[:3], "an a/c unit ..."])

        def communicate(self, **options):
            return (self.words.encode(),)

    monkeypatch.setattr(module.subprocess, "Popen", Java)
    assert ptb(texts) == words
