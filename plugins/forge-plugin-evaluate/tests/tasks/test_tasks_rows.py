"""From items to rows of tokens."""

from __future__ import annotations

import pytest

from forge_core.contracts.errors import DataError
from forge_core.contracts.layout import Layout
from forge_plugin_evaluate.tasks import Item
from forge_plugin_evaluate.tasks.rows import ChoiceRows, encode, encode_items, row_length
from forge_plugin_text.bytes import ByteTokenizer
from forge_testing.refusals import naming


class Words:
    """A token is a word with the space before it; it merges "good" and "bye" when they touch."""

    end_of_text = 0

    def __init__(self):
        self.known = {}

    def encode(self, text):
        words = text.replace(" ", "\x01 ").split("\x01")
        return [self.known.setdefault(word, len(self.known) + 1) for word in words if word]

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]


def test_a_choice_has_the_tokens_after_those_of_its_context():
    (choices,) = encode_items(Words(), [Item("say", (" yes", " no no"), 0)])
    assert [(row.tokens, row.learned) for row in choices] == [((1, 2), 1), ((1, 3, 3), 2)]


def test_spaces_at_the_end_of_a_context_belong_to_the_choice():
    tokenizer = Words()
    assert list(encode_items(tokenizer, [Item("say ", ("yes",), 0)])) == list(
        encode_items(tokenizer, [Item("say", (" yes",), 0)])
    )


def test_an_empty_context_is_an_end_of_text():
    (((only),),) = encode_items(Words(), [Item("", (" yes no",), 0)])
    assert (only.tokens, only.learned, only.positions) == ((0, 1, 2), 2, 2)


def test_the_beginning_of_text_stands_before_every_context():
    tokenizer = Words()
    tokenizer.begin_of_text = (7,)
    said, empty = encode_items(tokenizer, [Item("say", (" yes",), 0), Item("", (" yes",), 0)])
    assert [(row.tokens, row.learned) for row in (*said, *empty)] == [((7, 1, 2), 1), ((7, 2), 1)]


def test_labels_are_the_tokens_of_the_choice_and_nothing_else():
    tokenizer = ByteTokenizer()
    choices = [row for item in encode_items(tokenizer, [Item("ab", ("cd", "e"), 0)]) for row in item]
    rows = ChoiceRows(choices, 6, 256)
    assert len(rows) == 2
    assert rows[0]["input_ids"].tolist() == [97, 98, 99, 256, 256, 256]
    assert rows[0]["labels"].tolist() == [-100, 99, 100, -100, -100, -100]
    assert rows[1]["input_ids"].tolist() == [97, 98, 256, 256, 256, 256]
    assert rows[1]["labels"].tolist() == [-100, 101, -100, -100, -100, -100]
    assert [int(rows[number]["row"]) for number in range(2)] == [0, 1]


ITEMS = [Item("ab", ("c", "d"), 0), Item("abcdef", ("ghi", "j"), 1), Item("abcdefg", ("hij", "k"), 1)]


def test_items_that_are_too_long_are_refused_by_name_or_left_out_and_counted():
    facts = ("letters", "item 1", "8 positions", "train.seq_len is 7", "2 of 3", 'too_long = "leave_out"')
    with pytest.raises(DataError, match=naming(*facts)):
        encode(ByteTokenizer(), "letters", ITEMS, 7, leave_out=False)
    task = encode(ByteTokenizer(), "letters", ITEMS, 8, leave_out=True)
    assert (task.items, task.left_out, len(task.choices)) == (tuple(ITEMS[:2]), 1, 4)
    with pytest.raises(DataError, match=naming("every item", "train.seq_len = 1")):
        encode(ByteTokenizer(), "letters", ITEMS, 1, leave_out=True)


def test_a_choice_that_merges_with_its_context_is_refused():
    with pytest.raises(DataError, match=naming("choice 1", "item 0")):
        encode(Words(), "words", [Item("good", (" day", "bye"), 0)], 8, leave_out=False)


@pytest.mark.parametrize(
    ("longest", "layout", "length"),
    [
        (9, Layout(), 16),
        (16, Layout(shard=8), 16),
        (17, Layout(cp=4, tp=2), 32),
        (17, Layout(cp=3), 24),
        (41, Layout(pp=7), 48),
        (90, Layout(), 96),
        (97, Layout(), 100),
    ],
)
def test_rows_are_as_short_as_stages_can_divide(longest, layout, length):
    assert row_length(longest, 100, layout) == length
