"""Tokenizers: every text comes back, no text yields a special id, the same input gives the same ids."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from forge_core.contracts import data
from forge_kit.data.tokenizers import begin_of_text
from forge_plugin_text import BPE, Bytes, TokenizerFile
from forge_plugin_text.tokenizer_json import JsonTokenizer
from forge_plugin_text.training import train_bpe
from forge_testing.refusals import at, check_problems, refuses

DOCUMENTS = ["def f(x):\n    return x\n" * 20, "hello world, hello tokens " * 20, "naïve café 😀\n" * 5]
SPECIAL = ["<|endoftext|>", "<|user|>"]
NOWHERE = SimpleNamespace()


def documents() -> list[str]:
    return DOCUMENTS


@pytest.fixture(scope="module")
def bpe() -> JsonTokenizer:
    content = train_bpe(iter(DOCUMENTS), 320, 2, SPECIAL).to_str()
    return JsonTokenizer(content, SPECIAL[0])


any_text = st.text() | st.lists(st.sampled_from([*SPECIAL, "<|", "endoftext", "|>", " ", "a", "\n"])).map("".join)


# --- laws of every tokenizer -----------------------------------------------------------------------------------------


@given(text=any_text)
def test_bytes_give_every_text_back(text: str) -> None:
    tokenizer = Bytes().build(NOWHERE, documents)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.end_of_text not in tokenizer.encode(text)


@given(text=any_text)
@settings(deadline=None)
def test_bpe_gives_every_text_back_and_never_a_special_id(bpe: JsonTokenizer, text: str) -> None:
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert not {0, 1} & set(ids)


@given(texts=st.lists(any_text, max_size=5))
@settings(deadline=None)
def test_a_batch_is_encoded_like_its_texts(bpe: JsonTokenizer, texts: list[str]) -> None:
    for tokenizer in (bpe, Bytes().build(NOWHERE, documents)):
        assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("component", [Bytes(), BPE(vocab_size=300)])
def test_a_tokenizer_keeps_the_protocol(component) -> None:
    tokenizer = component.build(NOWHERE, documents)
    assert isinstance(tokenizer, data.Tokenizer)
    ids = tokenizer.encode("hello\n")
    assert max(ids) < tokenizer.vocab_size
    assert 0 <= tokenizer.end_of_text < tokenizer.vocab_size
    assert tokenizer.decode([*ids, tokenizer.end_of_text]) == "hello\n"
    assert len(bytes.fromhex(tokenizer.fingerprint())) == 32


@pytest.mark.parametrize("component", [Bytes(), BPE(vocab_size=300, end_of_text="<end>")])
def test_a_saved_tokenizer_is_loaded_unchanged(tmp_path: Path, component) -> None:
    tokenizer = component.build(NOWHERE, documents)
    tokenizer.save(tmp_path)
    loaded = component.load(NOWHERE, tmp_path)
    assert loaded.fingerprint() == tokenizer.fingerprint()
    assert loaded.encode("hello world <end>") == tokenizer.encode("hello world <end>")
    assert (loaded.vocab_size, loaded.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)


def test_the_size_of_a_vocabulary_is_known_before_a_text_is_read(tmp_path: Path, bpe: JsonTokenizer) -> None:
    bpe.save(tmp_path)
    file = TokenizerFile(path=str(tmp_path / "tokenizer.json"))
    assert file.expected_vocab_size() == bpe.vocab_size
    assert Bytes().expected_vocab_size() == Bytes().build(NOWHERE, documents).vocab_size
    trained = BPE(vocab_size=270, special_tokens=(SPECIAL[1],))
    assert trained.expected_vocab_size() == trained.build(NOWHERE, documents).vocab_size
    assert TokenizerFile(path="nowhere").expected_vocab_size() is None


def test_bytes_are_the_bytes_of_utf8() -> None:
    tokenizer = Bytes().build(NOWHERE, documents)
    assert tokenizer.encode("ä!") == [0xC3, 0xA4, 0x21]
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
    assert tokenizer.decode([0xC3, 0x21]) == "\ufffd!"
    assert tokenizer.decode([0x21, tokenizer.end_of_text, 319]) == "!"  # of a vocabulary padded to 320


# --- bpe -------------------------------------------------------------------------------------------------------------


def test_bpe_merges_the_most_frequent_pair_first() -> None:
    tokenizer = BPE(vocab_size=258).build(NOWHERE, lambda: ["xyxyxz " * 9])
    assert tokenizer.vocab_size == 258
    assert [tokenizer.decode([id_]) for id_ in tokenizer.encode("xyz")] == ["xy", "z"]


def test_a_small_corpus_gives_a_smaller_vocabulary() -> None:
    assert BPE(vocab_size=1000).build(NOWHERE, lambda: ["ab ab ab"]).vocab_size == 259  # end, bytes, "ab" and " ab"


def test_a_pair_below_the_minimal_frequency_is_not_merged() -> None:
    assert BPE(min_frequency=4).build(NOWHERE, lambda: ["ab ab ab"]).vocab_size == 257


@pytest.mark.parametrize("max_bytes", [6, 10])
def test_bpe_trains_on_the_first_documents_up_to_max_bytes(max_bytes: int) -> None:
    taken = BPE(max_bytes=max_bytes).build(NOWHERE, lambda: ["ab ab", "cd cd", "ef ef"])
    assert taken.fingerprint() == BPE().build(NOWHERE, lambda: ["ab ab", "cd cd"]).fingerprint()


def test_bpe_is_trained_once_for_the_same_documents_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    first = BPE(vocab_size=300).build(NOWHERE, documents)
    monkeypatch.setattr("forge_plugin_text.training.train_bpe", lambda *_: pytest.fail("trained again"))
    assert BPE(vocab_size=300).build(NOWHERE, documents).fingerprint() == first.fingerprint()


@pytest.mark.parametrize(
    "other",
    [
        lambda: BPE(vocab_size=290).build(NOWHERE, documents),
        lambda: BPE(vocab_size=300, min_frequency=60).build(NOWHERE, documents),
        lambda: BPE(vocab_size=300, end_of_text="<end>").build(NOWHERE, documents),
        lambda: BPE(vocab_size=300, special_tokens=("<|user|>",)).build(NOWHERE, documents),
        lambda: BPE(vocab_size=300).build(NOWHERE, lambda: DOCUMENTS[:2]),
    ],
)
def test_what_changes_an_encoding_changes_the_fingerprint(other) -> None:
    assert other().fingerprint() != BPE(vocab_size=300).build(NOWHERE, documents).fingerprint()


def test_a_damaged_tokenizer_in_the_cache_is_trained_again(cache: Path) -> None:
    intact = BPE(vocab_size=300).build(NOWHERE, documents).fingerprint()
    [path] = (cache / "tokenizers").glob("*/tokenizer.json")
    path.write_bytes(path.read_bytes().replace(b'"h"', b'"H"', 1))
    assert BPE(vocab_size=300).build(NOWHERE, documents).fingerprint() == intact


TRAIN = """
from types import SimpleNamespace
from forge_plugin_text import BPE
texts = [f"{n * n} words {n % 17} of text {n % 5} with several ties" for n in range(2000)]
print(BPE(vocab_size=600).build(SimpleNamespace(), lambda: texts).fingerprint())
"""


def test_training_does_not_depend_on_threads_or_hash_seeds(tmp_path: Path) -> None:
    prints = set()
    for threads in ("1", "2", "3"):
        settings = {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads, "FORGE_CACHE": str(tmp_path / threads)}
        run = subprocess.run(
            [sys.executable, "-c", TRAIN], env=os.environ | settings, capture_output=True, text=True, check=True
        )
        prints.add(run.stdout)
    assert len(prints) == 1


def test_bpe_without_text_is_an_error() -> None:
    with refuses("", "bpe", "text"):
        BPE().build(NOWHERE, lambda: [""])


def test_a_corpus_that_changes_during_training_is_an_error(cache: Path) -> None:
    versions = iter([["first version"], ["second version"]])
    with refuses("", "bpe", "changed"):
        BPE().build(NOWHERE, lambda: next(versions))
    assert list((cache / "tokenizers").iterdir()) == []


@pytest.mark.parametrize(
    ("component", "expected"),
    [
        (BPE(special_tokens=("<a>", "<a>")), at("special_tokens", "['<|endoftext|>', '<a>', '<a>']")),
        (BPE(vocab_size=257, special_tokens=("<a>",)), at("vocab_size", 257, "256 bytes", "2 special tokens", 258)),
    ],
)
def test_settings_of_bpe_that_contradict_each_other_are_problems(problems, component: BPE, expected) -> None:
    check_problems(problems(component), expected)


# --- file ------------------------------------------------------------------------------------------------------------


def write_tokenizer(path: Path, *added: AddedToken, model: models.Model | None = None) -> Tokenizer:
    tokenizer = train_bpe(iter(DOCUMENTS), 300, 2, []) if model is None else Tokenizer(model)
    tokenizer.add_tokens(list(added))
    tokenizer.save(str(path))
    return tokenizer


def special(content: str) -> AddedToken:
    return AddedToken(content, special=True)


@pytest.mark.parametrize(
    ("tokens", "end"),
    [
        (["<s>", "</s>"], "</s>"),
        (["<|im_end|>", "<|endoftext|>"], "<|endoftext|>"),
        (["<|eot_id|>", "<|end_of_text|>"], "<|end_of_text|>"),
        (["</s>", "<eos>"], "<eos>"),
    ],
)
def test_the_usual_end_of_text_is_found(tmp_path: Path, tokens: list[str], end: str) -> None:
    reference = write_tokenizer(tmp_path / "t.json", *map(special, tokens))
    tokenizer = TokenizerFile(path=str(tmp_path / "t.json")).build(NOWHERE, documents)
    assert tokenizer.end_of_text == reference.token_to_id(end)
    assert tokenizer.vocab_size == reference.get_vocab_size()


def test_the_end_of_text_can_be_named(tmp_path: Path) -> None:
    reference = write_tokenizer(tmp_path / "t.json", special("<|endoftext|>"), special("<|im_end|>"))
    tokenizer = TokenizerFile(path=str(tmp_path / "t.json"), end_of_text="<|im_end|>").build(NOWHERE, documents)
    assert tokenizer.end_of_text == reference.token_to_id("<|im_end|>")


def test_another_end_of_text_is_another_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "t.json", special("<a>"), special("<b>"))
    one, two = (TokenizerFile(path=str(tmp_path / "t.json"), end_of_text=end) for end in ("<a>", "<b>"))
    assert one.build(NOWHERE, documents).fingerprint() != two.build(NOWHERE, documents).fingerprint()


def test_nothing_is_added_to_a_text_or_cut_from_it(tmp_path: Path) -> None:
    reference = write_tokenizer(tmp_path / "t.json", special("<s>"), special("</s>"))
    expected = reference.encode(DOCUMENTS[0]).ids
    around = {"single": "<s> $A </s>", "special_tokens": [(token, reference.token_to_id(token)) for token in SPECIAL_S]}
    reference.post_processor = processors.TemplateProcessing(**around)
    reference.enable_truncation(5)
    reference.enable_padding(length=1000)
    reference.save(str(tmp_path / "t.json"))
    tokenizer = TokenizerFile(path=str(tmp_path / "t.json")).build(NOWHERE, documents)
    assert tokenizer.encode(DOCUMENTS[0]) == expected
    assert tokenizer.encode_batch([DOCUMENTS[0], ""]) == [expected, []]


SPECIAL_S = ("<s>", "</s>")


@pytest.mark.parametrize("is_special", [True, False])
def test_an_end_of_text_spelt_out_in_a_text_stays_text(tmp_path: Path, is_special: bool) -> None:
    write_tokenizer(tmp_path / "t.json", AddedToken("</s>", special=is_special))
    tokenizer = TokenizerFile(path=str(tmp_path / "t.json")).build(NOWHERE, documents)
    ids = tokenizer.encode("a </s> b")
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == "a </s> b"


def test_a_vocabulary_that_lets_text_spell_the_end_of_text_is_refused(tmp_path: Path) -> None:
    model = models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *((letter, -1.0) for letter in "ab </s>")], unk_id=0)
    write_tokenizer(tmp_path / "t.json", special("</s>"), model=model)
    with refuses("", "'</s>'", "id 1", "end_of_text"):
        TokenizerFile(path=str(tmp_path / "t.json")).build(NOWHERE, documents)


def test_ids_reach_up_to_the_vocabulary_size_where_the_file_leaves_gaps(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 700}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "t.json"))
    built = TokenizerFile(path=str(tmp_path / "t.json")).build(NOWHERE, documents)
    assert built.vocab_size == 701 > built.end_of_text


def test_a_file_without_a_usual_end_of_text_is_a_problem_that_lists_the_candidates(tmp_path: Path, problems) -> None:
    path = tmp_path / "t.json"
    write_tokenizer(path, special("<stop>"), special("<pad>"))
    names = (repr(str(path)), "'<stop>', '<pad>'")
    check_problems(problems(TokenizerFile(path=str(path))), at("end_of_text", *names))
    check_problems(problems(TokenizerFile(path=str(path), end_of_text="<eos>")), at("end_of_text", "'<eos>'", *names))
    assert problems(TokenizerFile(path=str(path), end_of_text="<stop>")) == []


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (None, ["[Errno 2]"]),
        ("{", ["tokenizer.json", "JSONDecodeError"]),
        (json.dumps({"a": 0}), ["tokenizer.json", "KeyError: 'added_tokens'"]),
    ],
)
def test_a_file_that_is_no_tokenizer_is_a_problem(
    tmp_path: Path, problems, content: str | None, facts: list[str]
) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    check_problems(problems(TokenizerFile(path=str(path))), at("path", repr(str(path)), *facts))


def test_a_file_that_tokenizers_cannot_use_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"added_tokens": [{"content": "</s>"}]}))
    with refuses("", "tokenizer.json", "`id`"):
        TokenizerFile(path=str(path)).build(NOWHERE, documents)


def test_a_tokenizer_sent_to_another_process_still_reads_special_tokens_as_text(bpe: JsonTokenizer) -> None:
    text = "before <|endoftext|> after"
    assert pickle.loads(pickle.dumps(bpe)).encode(text) == bpe.encode(text)


# --- the beginning of text -------------------------------------------------------------------------------------------


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A tokenizer.json that puts `<|user|>` before a text, as Llama 3's puts a token of its own."""
    tokenizer = train_bpe(iter(DOCUMENTS), 320, 2, SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|user|> $A <|endoftext|>", special_tokens=[("<|user|>", 1), ("<|endoftext|>", 0)]
    )
    tokenizer.save(str(tmp_path / "llama.json"))
    return str(tmp_path / "llama.json")


@pytest.mark.parametrize("asked", ["auto", "<|user|>"])
def test_the_beginning_of_text_is_what_the_file_puts_before_one(llama: str, tmp_path: Path, asked: str) -> None:
    component = TokenizerFile(path=llama, begin_of_text=asked)
    tokenizer, plain = component.build(NOWHERE, documents), TokenizerFile(path=llama).build(NOWHERE, documents)
    reference = Tokenizer.from_file(llama).encode("hello")
    assert [*tokenizer.begin_of_text, *tokenizer.encode("hello"), tokenizer.end_of_text] == reference.ids
    assert plain.begin_of_text == []
    assert plain.fingerprint() != tokenizer.fingerprint()
    assert tokenizer.decode([1, *tokenizer.encode("hello <|user|>")]) == "hello <|user|>"
    tokenizer.save(tmp_path)
    for copy in (component.load(NOWHERE, tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        assert (copy.begin_of_text, copy.fingerprint()) == ([1], tokenizer.fingerprint())


@pytest.mark.parametrize(
    ("token", "facts"),
    [
        ("<s>", ["'<s>'", "'<|user|>'", '"auto"']),
        ("<|endoftext|>", ["'<|endoftext|>'", "ends documents"]),
    ],
)
def test_a_beginning_that_is_no_token_or_the_end_is_refused(llama: str, token: str, facts: list[str]) -> None:
    with refuses("begin_of_text", *facts):
        TokenizerFile(path=llama, begin_of_text=token).build(NOWHERE, documents)


def test_bytes_and_a_trained_bpe_have_no_beginning(bpe: JsonTokenizer) -> None:
    assert begin_of_text(bpe) == begin_of_text(Bytes().build(NOWHERE, documents)) == []
