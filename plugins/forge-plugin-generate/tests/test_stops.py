"""Texts that end an answer, with the tokenizers of published models."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from forge_core.contracts.errors import JobError
from forge_plugin_generate.stops import Stops
from forge_plugin_huggingface import Auto
from forge_testing.refusals import naming

TEXTS = ["Hello the cat, hello what there. The end of the text\n"] * 3


def saved(own: Tokenizer, trainer: trainers.Trainer, folder, **names: str):
    own.train_from_iterator(TEXTS, trainer)
    PreTrainedTokenizerFast(tokenizer_object=own, **names).save_pretrained(folder)
    return Auto(path=str(folder)).build(None, None)


@pytest.fixture
def spaces(tmp_path):
    """Its decoder leaves out the first space of a text, as those of SentencePiece do."""
    own = Tokenizer(models.BPE(unk_token="<unk>"))
    own.pre_tokenizer, own.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", "</s>"], show_progress=False)
    return saved(own, trainer, tmp_path, eos_token="</s>", unk_token="<unk>")


@pytest.fixture
def bytes_(tmp_path):
    own = Tokenizer(models.BPE())
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|turn|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    return saved(own, trainer, tmp_path, eos_token="<|end|>", additional_special_tokens=["<|turn|>"])


@pytest.fixture
def pieces(tmp_path):
    """It writes small letters alone, and knows few of them."""
    own = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    own.normalizer, own.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    own.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=80, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    return saved(own, trainer, tmp_path, eos_token="[SEP]", unk_token="[UNK]")


def test_a_text_is_found_whatever_tokens_spell_it(spaces):
    stops = Stops.of(spaces, [" the"])
    [letters] = [[*spaces.encode("Hello"), *(spaces.encode(f"x {letter}")[-1] for letter in "t"), *spaces.encode("he")]]
    for ids in (letters[:-1], spaces.encode("Hello the what"), spaces.encode("Hello there")):
        ended = next((end for end in range(1, len(ids) + 1) if stops.reached(ids[:end])), None)
        found = " the" in spaces.decode(ids)
        assert (ended is not None) == found
        assert stops.decode(ids) == (spaces.decode(ids).partition(" the")[0])
    assert stops.decode(spaces.encode("Hello there")) == "Hello"


def test_a_special_token_by_itself_is_an_id(bytes_):
    turn = bytes_.token_id("<|turn|>")
    assert Stops.of(bytes_, ["<|turn|>"]) == Stops(bytes_, sorted({*bytes_.stop_ids(), turn}))
    assert Stops.of(bytes_, ["é\n", " the"]).texts == ("é\n", " the")


@pytest.mark.parametrize(
    ("which", "stop", "facts"),
    [
        ("bytes_", "<|turn|>\n", ["'<|turn|>'", "special token", "by itself"]),
        ("bytes_", "\udcff", ["UTF-8"]),
        ("pieces", "日", ["'日'", "never"]),
        ("pieces", "END", ["'END'", "'end'"]),
        ("spaces", "", ["empty"]),
    ],
)
def test_a_stop_that_would_never_be_found_is_refused(request, which, stop, facts):
    with pytest.raises(JobError, match=naming(*facts)):
        Stops.of(request.getfixturevalue(which), [stop])
