"""Key `begin_of_text`: once before every document, chat and prompt; and where answers end."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer, ByT5Tokenizer

from forge_kit.data.tokenizers import BeginsText, begin_of_text
from forge_plugin_huggingface import Auto
from forge_testing.refusals import refuses

BEGIN, START, END = 3, 1, 0
"""Ids of `<|start_header_id|>`, which begins documents here, of `<|im_start|>` and of `<|endoftext|>`."""
BOS = "<|start_header_id|>"
CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
WITH_BOS = "{{- bos_token }}" + CHATML
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello world"}]
NOWHERE = SimpleNamespace()


@pytest.fixture
def llama(pretrained: Any) -> Any:
    """Saves a tokenizer whose files put `BOS` before a text, as Llama 3's do: (template) -> its folder."""

    def run(chat_template: str | None = None, name: str = "llama", **settings: Any) -> str:
        folder = pretrained(chat_template, name, bos_token=BOS, **settings)
        path = str(Path(folder, "tokenizer.json"))
        changed = Tokenizer.from_file(path)
        changed.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BEGIN)])
        changed.save(path)
        return folder

    return run


# --- the tokenizer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["auto", BOS])
def test_it_is_what_transformers_puts_before_a_text(llama, auto, asked: str) -> None:
    folder = llama()
    tokenizer, reference = auto(folder, begin_of_text=asked), AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, BeginsText)
    for text in ("hello world", "", f"{BOS} spelt out"):
        expected = reference(text, split_special_tokens=True)["input_ids"]
        assert [*begin_of_text(tokenizer), *tokenizer.encode(text)] == expected
    assert tokenizer.decode([BEGIN, *tokenizer.encode("hello"), END]) == "hello"


def test_there_is_none_unless_asked_for_nor_where_the_files_put_none(llama, pretrained, auto) -> None:
    assert begin_of_text(auto(llama())) == []
    assert begin_of_text(auto(pretrained(), begin_of_text="auto")) == []


def test_it_counts_in_the_fingerprint_and_is_kept(llama, auto, tmp_path: Path) -> None:
    folder = llama()
    without, own, named = (auto(folder, begin_of_text=key) for key in ("", "auto", BOS))
    assert own.fingerprint() == named.fingerprint() != without.fingerprint() == auto(folder).fingerprint()
    assert auto(folder, begin_of_text="<|im_start|>").fingerprint() != own.fingerprint()
    kept = tmp_path / "kept"
    kept.mkdir()
    own.save(kept)
    loaded = Auto(path="gone", begin_of_text="auto").load(NOWHERE, kept)
    for copy in (loaded, pickle.loads(pickle.dumps(own))):
        assert (copy.begin_of_text, copy.fingerprint()) == ([BEGIN], own.fingerprint())


def test_a_tokenizer_that_is_python_code_has_none_of_its_own(auto, tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(str(tmp_path))
    assert auto(str(tmp_path), begin_of_text="auto").begin_of_text == []


def test_a_token_that_is_none_or_ends_documents_is_refused(pretrained, auto) -> None:
    with refuses("begin_of_text", "'<s>'", "'<|im_start|>'", '"auto"'):
        auto(pretrained(), begin_of_text="<s>")
    with refuses("begin_of_text", "'<|endoftext|>'", "ends documents"):
        auto(pretrained(), begin_of_text="<|endoftext|>")


# --- documents -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_every_document_begins_with_it(write, build_dataset, llama, auto, streaming: bool) -> None:
    texts = [f"hello world {number}" for number in range(8)]
    folder = write("jsonl", [{"text": text} for text in texts])
    tokenizer = auto(llama(), begin_of_text="auto")
    held = {"held_out_every": 4, "held_out_documents": 2}
    data = build_dataset(folder, tokenizer, rows=1, streaming=streaming, **held)
    expected = [[BEGIN, *tokenizer.encode(text), END] for text in texts]
    training = [ids for number, ids in enumerate(expected) if number % 4]
    if streaming:
        stream = data.read(0, None)
        assert [next(stream).tokens.tolist() for _ in training] == training
    else:
        assert data.tokens(0, len(data)).tolist() == [id_ for ids in training for id_ in ids]
    assert data.held_out.tokens(0, len(data.held_out)).tolist() == expected[0] + expected[4]


def test_tokens_that_were_cached_without_it_are_not_taken(write, build_dataset, llama, auto) -> None:
    folder, tokenizer = write("jsonl", [{"text": "hello"}]), llama()
    counts = [len(build_dataset(folder, auto(tokenizer, begin_of_text=key))) for key in ("", "auto", "")]
    assert counts[1] == counts[0] + 1
    assert counts[2] == counts[0]


@pytest.mark.parametrize("template", [CHATML, WITH_BOS], ids=["template without it", "template that writes it"])
def test_a_chat_begins_with_it_once_and_it_is_not_learned(write, build_dataset, llama, auto, template: str) -> None:
    folder = llama(template)
    tokenizer, plain = auto(folder, begin_of_text="auto"), auto(folder)
    chat, without = tokenizer.chat(CHAT), plain.chat(CHAT)
    assert chat.ids.tolist().count(BEGIN) == 1
    assert chat.ids[0] == BEGIN
    assert not chat.learned[0]
    own = int(template == WITH_BOS)
    assert (chat.ids[1:] == without.ids[own:]).all()
    assert (chat.learned[1:] == without.learned[own:]).all()
    first, *others = tokenizer.chat_parts(CHAT, "world")
    assert sum(part.ids.tolist().count(BEGIN) for part in (first, *others)) == 1
    assert first.ids[0] == BEGIN
    documents = build_dataset(write("jsonl", [{"messages": CHAT}] * 2), tokenizer, messages="messages")
    assert documents.tokens(0, len(documents)).tolist() == [*chat.ids, END] * 2


# --- prompts and the end of answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "auto"])
def test_a_prompt_is_what_transformers_makes_of_the_conversation(llama, auto, key: str) -> None:
    folder = llama(WITH_BOS)
    reference = AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)
    assert auto(folder, begin_of_text=key).chat_prompt(CHAT[:1]) == expected
    begun = auto(llama(CHATML, "other"), begin_of_text="auto").chat_prompt(CHAT[:1])
    assert begun == expected


def test_answers_end_with_the_text_and_where_the_template_ends_a_turn(pretrained, auto) -> None:
    assert auto(pretrained()).stop_ids() == [END]
    assert auto(pretrained(CHATML)).stop_ids() == [END, 2]
    assert auto(pretrained(name="other", eos_token="<|eot_id|>"), end_of_text="<|endoftext|>").stop_ids() == [END, 5]
    refuses = "{{ raise_exception('not today') }}"
    assert auto(pretrained(refuses, name="refuses")).stop_ids() == [END]


@pytest.mark.parametrize(("listed", "ids"), [([0, 2, 5], [0, 2, 5]), (5, [0, 5]), (None, [0])])
def test_answers_end_at_the_ids_that_generation_config_lists(pretrained, auto, tmp_path: Path, listed, ids) -> None:
    folder = pretrained()
    before = auto(folder)
    Path(folder, "generation_config.json").write_text(json.dumps({"eos_token_id": listed, "top_p": 0.9}))
    tokenizer = auto(folder)
    assert tokenizer.stop_ids() == ids
    assert tokenizer.fingerprint() == before.fingerprint()
    kept = tmp_path / "kept"
    kept.mkdir()
    tokenizer.save(kept)
    assert Auto(path=folder).load(NOWHERE, kept).stop_ids() == ids
