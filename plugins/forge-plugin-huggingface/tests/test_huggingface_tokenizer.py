"""Tokenizer `auto`: ids of the tokenizer's own files, and text that stays text."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer, ByT5Tokenizer, GPT2Tokenizer

from forge_core.contracts import data
from forge_plugin_huggingface import Auto
from forge_testing.refusals import at, check_problems, refuses

any_text = st.text() | st.lists(st.sampled_from(["<|endoftext|>", "<|im_end|>", "<|", " ", "a", "\n"])).map("".join)
NOWHERE = SimpleNamespace()
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@given(text=any_text)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_every_text_comes_back_and_none_gives_a_special_id(backend: Tokenizer, kept, text: str) -> None:
    ids = kept.encode(text)
    assert kept.decode([*ids, kept.end_of_text]) == text
    assert not set(ids) & set(range(6))


@pytest.fixture
def kept(pretrained, auto):
    return auto(pretrained())


@pytest.mark.parametrize("text", ["hello world", " a\n\n  text", "naïve 😀", "", "user: <s>"])
def test_ids_are_those_of_the_tokenizer_json(pretrained, auto, text: str) -> None:
    folder = pretrained()
    reference = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer = auto(folder)
    assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode_batch([text, "hello"]) == [tokenizer.encode(text), tokenizer.encode("hello")]
    assert tokenizer.vocab_size == reference.get_vocab_size()
    assert isinstance(tokenizer, data.Tokenizer)


def test_nothing_is_put_around_a_text_or_cut_from_it(pretrained, auto, backend: Tokenizer) -> None:
    folder = pretrained()
    path = Path(folder, "tokenizer.json")
    around = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    changed = Tokenizer.from_file(str(path))
    changed.post_processor = around
    changed.enable_truncation(3)
    changed.enable_padding(length=50)
    changed.save(str(path))
    assert AutoTokenizer.from_pretrained(folder)("hello world")["input_ids"][0] == 1
    assert auto(folder).encode("hello world, hello") == backend.encode("hello world, hello").ids


def test_the_end_of_text_is_the_tokenizers_own_unless_another_is_named(pretrained, auto) -> None:
    folder = pretrained(eos_token="<|im_end|>")
    assert auto(folder).end_of_text == 2
    assert auto(folder, end_of_text="<|eot_id|>").end_of_text == 5


def test_the_size_of_the_vocabulary_is_known_where_the_tokenizer_is_here(pretrained, auto) -> None:
    folder = pretrained()
    assert Auto(path=folder).expected_vocab_size() == auto(folder).vocab_size
    assert Auto(path="organisation/on-the-hub").expected_vocab_size() is None


def test_a_tokenizer_without_end_of_text_is_an_error_that_lists_the_candidates(pretrained, auto) -> None:
    folder = pretrained(eos_token=None)
    candidates = "'<|endoftext|>', '<|im_start|>', "
    with refuses("end_of_text", "eos_token", candidates):
        auto(folder)
    with refuses("end_of_text", "'<eos>'", candidates):
        auto(folder, end_of_text="<eos>")


def test_a_saved_tokenizer_is_loaded_unchanged_however_often(pretrained, auto, tmp_path: Path) -> None:
    component = Auto(path=pretrained(TEMPLATE), end_of_text="<|im_end|>", chat_variables={"date": "today"})
    tokenizer = component.build(NOWHERE, tuple)
    for number in range(3):
        folder = tmp_path / f"kept-{number}"
        folder.mkdir()
        tokenizer.save(folder)
        loaded = component.load(NOWHERE, folder)
        assert loaded.fingerprint() == tokenizer.fingerprint()
        assert (loaded.vocab_size, loaded.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)
        assert loaded.encode("hello <|im_end|>") == tokenizer.encode("hello <|im_end|>")
        tokenizer = loaded


def published_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_published_files_are_kept_byte_for_byte_from_run_to_run(pretrained, auto, tmp_path: Path) -> None:
    folder = Path(pretrained(TEMPLATE))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    # As version 4 of transformers wrote it, with spaces that no program of today writes
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=7))
    (folder / "special_tokens_map.json").write_text('{ "eos_token":"<|endoftext|>" }')
    before, reference = published_files(folder), auto(str(folder))
    path, template = str(folder), tmp_path / "template.jinja"
    for number in range(2):
        kept = tmp_path / f"kept-{number}"
        kept.mkdir()
        tokenizer = auto(path)
        tokenizer.save(kept)
        assert published_files(kept / "source") == before
        assert tokenizer.fingerprint() == reference.fingerprint(), "the same tokenizer from either files"
        path = str(kept)
    template.write_text(TEMPLATE.replace(":", "-"))
    (changed := tmp_path / "changed").mkdir()
    auto(path, chat_template=str(template)).save(changed)
    assert published_files(changed / "source") == before | {"chat_template.jinja": template.read_bytes()}
    (kept / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|im_end|>"}))
    (edited := tmp_path / "edited").mkdir()
    auto(path).save(edited)
    assert not (edited / "source").exists(), "they no longer are what encodes"


def test_a_copy_for_another_process_encodes_the_same(pretrained, auto) -> None:
    tokenizer = auto(pretrained(TEMPLATE), chat_variables={"date": "today"})
    text, chat = "hello <|im_end|><|endoftext|>", [{"role": "user", "content": "hello"}]
    expected = tokenizer.encode(text), tokenizer.fingerprint(), tokenizer.chat(chat).ids.tolist()
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert (copy.encode(text), copy.fingerprint(), copy.chat(chat).ids.tolist()) == expected


def test_the_same_files_in_another_folder_have_the_same_fingerprint(pretrained, auto) -> None:
    assert auto(pretrained(name="one")).fingerprint() == auto(pretrained(name="two")).fingerprint()


def test_what_may_change_an_encoding_changes_the_fingerprint(pretrained, auto, tmp_path: Path) -> None:
    folder, template = pretrained(TEMPLATE), tmp_path / "template.jinja"
    template.write_text(TEMPLATE.replace(":", "-"))
    other = pretrained(TEMPLATE, name="other")
    content = json.loads(Path(other, "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    Path(other, "tokenizer.json").write_text(json.dumps(content))
    found = [
        auto(folder),
        auto(folder, end_of_text="<|im_end|>"),
        auto(folder, chat_template=str(template)),
        auto(folder, chat_variables={"date": "today"}),
        auto(pretrained(TEMPLATE, name="bos", bos_token="<|im_start|>")),
        auto(other),
    ]
    assert len({tokenizer.fingerprint() for tokenizer in found}) == len(found)


def test_tokenizers_with_a_class_of_their_own_encode_like_it(backend: Tokenizer, auto, tmp_path: Path) -> None:
    model = json.loads(backend.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    GPT2Tokenizer(vocab=model["vocab"], merges=merges).save_pretrained(str(tmp_path))
    tokenizer, own = auto(str(tmp_path)), AutoTokenizer.from_pretrained(str(tmp_path))
    assert type(own).__name__ == "GPT2Tokenizer"
    for text in ("hello world", " two  spaces", "line\n\nline"):
        assert tokenizer.encode(text) == own(text, add_special_tokens=False)["input_ids"]


def test_a_tokenizer_that_is_python_code_encodes_too(auto, tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(str(tmp_path))
    tokenizer = auto(str(tmp_path))
    text = "ä </s> b"
    assert tokenizer.encode(text) == [byte + 3 for byte in text.encode()]
    assert tokenizer.encode_batch(["a", ""]) == [[100], []]
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.end_of_text]) == text
    kept = tmp_path / "kept"
    kept.mkdir()
    tokenizer.save(kept)
    assert Auto(path=str(tmp_path)).load(NOWHERE, kept).fingerprint() == tokenizer.fingerprint()
    with refuses("", "tokenizer.json"):
        tokenizer.check_chat()


def test_a_name_that_cannot_be_had_is_an_error_that_says_what_was_tried(auto) -> None:
    with refuses("path", "'nobody/nothing'", "OSError", f"{Path.cwd()}/nobody/nothing", "HF_HUB_OFFLINE"):
        auto("nobody/nothing")


def test_a_folder_without_a_tokenizer_is_an_error(auto, tmp_path: Path) -> None:
    with refuses("path", repr(str(tmp_path)), f"the folder {tmp_path}"):
        auto(str(tmp_path))


def test_mistakes_that_show_without_loading_are_problems(problems, pretrained, tmp_path: Path) -> None:
    folder, file = pretrained(), f"{pretrained()}/tokenizer.json"
    check_problems(problems(Auto(path="")), at("path"))
    check_problems(problems(Auto(path=file)), at("path", repr(file), "file"))
    check_problems(problems(Auto(path="./none")), at("path", "'./none'", Path.cwd()))
    check_problems(problems(Auto(path=folder, revision="main")), at("revision", "'main'", repr(folder)))
    check_problems(
        problems(Auto(path=folder, chat_template="none.jinja")), at("chat_template", "'none.jinja'", "Errno 2")
    )
    reserved = problems(Auto(path=folder, chat_variables={"tools": ""}))
    check_problems(reserved, at("chat_variables.tools", "apply_chat_template"))
    assert problems(Auto(path=folder)) == problems(Auto(path="owner/name", revision="main")) == []


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'tokenizers', 'transformers', 'datasets', 'huggingface_hub', 'pyarrow'}"
    program = f"import sys, forge_plugin_huggingface; print(*({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
