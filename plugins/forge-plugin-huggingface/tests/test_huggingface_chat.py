"""Chats: written by the tokenizer's template, and only what the assistant says is learned."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from forge_core.contracts.errors import JobError
from forge_plugin_huggingface import Auto, HuggingFace
from forge_plugin_huggingface.chat import learned_tokens
from forge_testing.refusals import at, check_problems, refuses

CHATML = (
    "{%- if tools %}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
CHATML_MARKED = """{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\n' -}}
        {%- generation -%}
            {{- message.content + '<|im_end|>' -}}
        {%- endgeneration -%}
        {{- '\n' -}}
    {%- else -%}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
"""
LLAMA = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
LLAMA_MARKED = """{{ bos_token }}
{%- macro turn(message) -%}
<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if message.role == 'assistant' %}
{% generation %}
{{ message.content | trim }}<|eot_id|>
{%- endgeneration %}
{% else %}
{{ message.content | trim }}<|eot_id|>
{%- endif %}
{%- endmacro %}
{%- for message in messages %}
{{- turn(message) }}
{%- endfor %}"""
PLAIN = """{%- for message in messages %}{{- message.role + ':\n' + message.content + '\n\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant:\n' }}{%- endif %}"""
"""No token ends a turn: it ends with a blank line."""
STYLES = {
    "plain": (PLAIN, "\n\n"),
    "chatml": (CHATML, "<|im_end|>"),
    "chatml marked": (CHATML_MARKED, "<|im_end|>"),
    "llama": (LLAMA, "<|eot_id|>"),
    "llama marked in a macro": (LLAMA_MARKED, "<|eot_id|>"),
}
CONVERSATION = [
    {"role": "system", "content": "answer as an assistant"},
    {"role": "user", "content": "hello?"},
    {"role": "assistant", "content": "hello world, user"},
    {"role": "user", "content": "assistant\nuser"},
    {"role": "assistant", "content": "this is a text\n\nto  train on"},
]


@pytest.fixture
def chat_tokenizer(pretrained, auto):
    """A tokenizer with this template: (template, keys) -> it."""
    return lambda template, **keys: auto(pretrained(template, bos_token="<|im_start|>"), **keys)


def learned_texts(tokenizer: Any, chat: Any) -> list[str]:
    """What each run of learned tokens says, with special tokens."""
    runs = groupby(zip(chat.ids.tolist(), chat.learned.tolist(), strict=True), key=lambda token: token[1])
    hf = tokenizer._pretrained
    return [hf.decode([id_ for id_, _ in run], skip_special_tokens=False) for learned, run in runs if learned]


def role_and_content(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize("style", STYLES)
def test_learned_are_the_assistants_texts_and_the_ends_of_its_turns(chat_tokenizer, style: str) -> None:
    template, end = STYLES[style]
    tokenizer = chat_tokenizer(template)
    chat = tokenizer.chat(CONVERSATION)
    assert learned_texts(tokenizer, chat) == [f"hello world, user{end}", f"this is a text\n\nto  train on{end}"]


@pytest.mark.parametrize("style", STYLES)
def test_ids_are_those_of_apply_chat_template(pretrained, auto, style: str) -> None:
    folder = pretrained(STYLES[style][0], bos_token="<|im_start|>")
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(CONVERSATION)["input_ids"]
    assert auto(folder).chat(CONVERSATION).ids.tolist() == expected


@pytest.mark.parametrize("style", STYLES)
def test_texts_of_prompts_are_those_of_apply_chat_template(pretrained, auto, style: str) -> None:
    folder = pretrained(STYLES[style][0], bos_token="<|im_start|>")
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = auto(folder)
    prompt = reference.apply_chat_template(CONVERSATION[:-1], tokenize=False, add_generation_prompt=True)
    begun = reference.apply_chat_template(CONVERSATION, tokenize=False, continue_final_message=True)
    assert tokenizer.chat_text(CONVERSATION[:-1]) == prompt
    assert tokenizer.chat_text(CONVERSATION, goes_on=True) == begun


def test_where_marks_stand_outside_of_macros_learned_is_what_apply_chat_template_says(pretrained, auto) -> None:
    folder = pretrained(CHATML_MARKED)
    asked = {"return_dict": True, "return_assistant_tokens_mask": True}
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(CONVERSATION, **asked)["assistant_masks"]
    assert auto(folder).chat(CONVERSATION).learned.tolist() == [bool(learned) for learned in expected]


def test_a_whole_conversation_token_by_token(chat_tokenizer) -> None:
    tokenizer = chat_tokenizer(CHATML)
    chat = tokenizer.chat([role_and_content("user", "hi"), role_and_content("assistant", "yo")])
    newline, hi, yo = (tokenizer.encode(text) for text in ("\n", "hi", "yo"))
    user, assistant = tokenizer.encode("user"), tokenizer.encode("assistant")
    question = [1, *user, *newline, *hi, 2, *newline]
    head, answer = [1, *assistant, *newline], [*yo, 2]
    assert chat.ids.tolist() == [*question, *head, *answer, *newline]
    expected = [False] * len(question + head) + [True] * len(answer) + [False]
    assert chat.learned.tolist() == expected


contents = st.text(st.sampled_from("ab \n😀é<|"), min_size=1, max_size=12).filter(lambda text: text.strip() == text)


@given(st.lists(st.tuples(contents, contents), min_size=1, max_size=3))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_both_ways_to_find_the_answers_agree(marked, unmarked, turns: list[tuple[str, str]]) -> None:
    conversation = []
    for question, answer in turns:
        conversation += [role_and_content("user", question), role_and_content("assistant", answer)]
    one, two = marked.chat(conversation), unmarked.chat(conversation)
    assert one.ids.tolist() == two.ids.tolist()
    assert one.learned.tolist() == two.learned.tolist()
    assert learned_texts(marked, one) == [f"{answer}<|im_end|>" for _, answer in turns]


@pytest.fixture
def marked(pretrained, auto):
    return auto(pretrained(CHATML_MARKED, name="marked"))


@pytest.fixture
def unmarked(pretrained, auto):
    return auto(pretrained(CHATML, name="unmarked"))


def test_answers_that_follow_each_other_are_all_learned(chat_tokenizer) -> None:
    tokenizer = chat_tokenizer(CHATML)
    conversation = [
        role_and_content("user", "hi"),
        role_and_content("assistant", "one"),
        role_and_content("tool", "two"),
        role_and_content("assistant", "three"),
        role_and_content("assistant", "four"),
    ]
    found = learned_texts(tokenizer, tokenizer.chat(conversation))
    assert found == ["one<|im_end|>", "three<|im_end|>", "four<|im_end|>"]


def test_tools_reach_the_template(chat_tokenizer) -> None:
    tokenizer = chat_tokenizer(CHATML)
    tools = [{"type": "function", "function": {"name": "look"}}]
    chat = tokenizer.chat(CONVERSATION, tools)
    written = tokenizer._pretrained.decode(chat.ids)
    assert written.startswith(f"<|im_start|>system\n{json.dumps(tools)}<|im_end|>\n<|im_start|>system\nanswer")
    assert len(learned_texts(tokenizer, chat)) == 2


def test_variables_reach_the_template(chat_tokenizer) -> None:
    template = "{% if shout %}{{ messages[0].content | upper }}{% endif %}" + CHATML
    chat = chat_tokenizer(template, chat_variables={"shout": True}).chat(CONVERSATION)
    assert chat.ids[:2].tolist() != chat_tokenizer(template).chat(CONVERSATION).ids[:2].tolist()


def test_a_template_from_a_file_takes_the_place_of_the_tokenizers_own(pretrained, auto, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(CHATML_MARKED)
    component = Auto(path=pretrained("{{ raise_exception('own') }}"), chat_template=str(tmp_path / "t.jinja"))
    tokenizer = component.build(SimpleNamespace(), tuple)
    folder = tmp_path / "kept"
    folder.mkdir()
    tokenizer.save(folder)
    (tmp_path / "t.jinja").unlink()
    for built in (tokenizer, component.load(SimpleNamespace(), folder)):
        assert len(learned_texts(built, built.chat(CONVERSATION))) == 2


# --- templates that do not show whose part is whose ---------------------------------------------------------------

FORGETFUL = CHATML.replace("message.content +", "(message.content if loop.last else message.content[:3]) +")
"""Shortens answers that others follow, as templates of reasoning models do with thoughts."""


def test_a_template_that_writes_answers_otherwise_later_on_must_mark_generation(chat_tokenizer) -> None:
    with refuses("", "message 2", "{% generation %}", "{% endgeneration %}", "[data.tokenizer]", "chat_template"):
        chat_tokenizer(FORGETFUL).chat(CONVERSATION)


def test_a_template_whose_prompt_is_not_how_its_answers_begin_must_mark_generation(chat_tokenizer) -> None:
    template = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'")
    with refuses("", "message 2", "{% generation %}"):
        chat_tokenizer(template).chat(CONVERSATION)


def test_a_template_that_changes_what_its_marks_enclose_is_refused(chat_tokenizer) -> None:
    template = (
        "{% for m in messages %}{% set text %}{% generation %}{{ m.content }} {% endgeneration %}{% endset %}"
        "{{ text | trim }}{% endfor %}"
    )
    with refuses("", "changes", "{% generation %}", "[data.tokenizer]"):
        chat_tokenizer(template).chat(CONVERSATION)


def test_marks_within_marks_are_refused(chat_tokenizer) -> None:
    template = "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}"
    with pytest.raises(JobError, match=r"puts one \{% generation %\} into another"):
        chat_tokenizer(template).chat(CONVERSATION)


def test_a_template_that_writes_the_date_of_today_needs_a_date(chat_tokenizer) -> None:
    template = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b') %}{% endif %}"
    template = template + "{{ date_string }}" + CHATML
    with refuses("", "date_string", "[data.tokenizer.chat_variables]"):
        chat_tokenizer(template).chat(CONVERSATION)
    tokenizer = chat_tokenizer(template, chat_variables={"date_string": "26 Jul"})
    assert tokenizer._pretrained.decode(tokenizer.chat(CONVERSATION).ids).startswith("26 Jul<|im_start|>")


def test_what_a_template_refuses_is_an_error_with_its_words(chat_tokenizer) -> None:
    with refuses("", "roles must alternate"):
        chat_tokenizer("{{ raise_exception('roles must alternate') }}").chat(CONVERSATION)


def test_code_points_that_serve_as_marks_are_refused(chat_tokenizer) -> None:
    with pytest.raises(JobError, match=r"U\+FDD0"):
        chat_tokenizer(CHATML_MARKED).chat([role_and_content("user", "a\ufdd0b")])


def test_a_tokenizer_without_a_template_is_an_error(chat_tokenizer) -> None:
    with refuses("", "chat_template", "[data.tokenizer]"):
        chat_tokenizer(None).check_chat()


# --- which tokens lie in a part of the text ------------------------------------------------------------------------


def test_tokens_are_learned_that_lie_in_a_span_be_it_in_part() -> None:
    offsets = [(0, 2), (2, 4), (4, 4), (4, 7), (4, 7), (7, 9)]
    cases = {
        (2, 7): [False, True, True, True, True, False],
        (3, 5): [False, True, True, True, True, False],
        (0, 2): [True, False, False, False, False, False],
        (7, 9): [False, False, False, False, False, True],
        (3, 3): [False] * 6,
    }
    for span, expected in cases.items():
        if span != (3, 3):
            assert learned_tokens(offsets, [span]).tolist() == expected, span
    assert learned_tokens(offsets, []).tolist() == [False] * 6
    assert learned_tokens([], [(0, 0)]).tolist() == []


# --- as a dataset ----------------------------------------------------------------------------------------------------


def rows_of(*conversations: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    return [{"messages": messages} for messages in conversations]


@pytest.mark.parametrize("format_", ["jsonl", "parquet", "saved"])
def test_documents_are_conversations_each_with_an_end_of_text_that_is_not_learned_after_a_line_break(
    write, build_dataset, chat_tokenizer, format_: str
) -> None:
    tokenizer = chat_tokenizer(CHATML)
    documents = build_dataset(write(format_, rows_of(CONVERSATION, CONVERSATION[1:3])), tokenizer, messages="messages")
    chats = [tokenizer.chat(CONVERSATION), tokenizer.chat(CONVERSATION[1:3])]
    ids = np.concatenate([np.append(chat.ids, tokenizer.end_of_text) for chat in chats])
    learned = np.concatenate([np.append(chat.learned, False) for chat in chats])
    assert documents.tokens(0, len(documents)).tolist() == ids.tolist()
    assert documents.learned(0, len(documents)).tolist() == learned.tolist()
    assert documents.ends().tolist() == np.cumsum([len(chat.ids) + 1 for chat in chats]).tolist()
    assert documents.bytes_per_token is None


def test_where_the_answer_is_last_the_end_of_text_is_learned(write, build_dataset, chat_tokenizer) -> None:
    tokenizer = chat_tokenizer(LLAMA)
    documents = build_dataset(write("jsonl", rows_of(CONVERSATION)), tokenizer, messages="messages")
    assert documents.tokens(0, len(documents))[-2:].tolist() == [5, 0]
    assert documents.learned(0, len(documents))[-2:].tolist() == [True, True]


def test_an_end_of_text_that_ends_turns_too_is_not_doubled(write, build_dataset, chat_tokenizer) -> None:
    tokenizer = chat_tokenizer(LLAMA, end_of_text="<|eot_id|>")
    documents = build_dataset(write("jsonl", rows_of(CONVERSATION)), tokenizer, messages="messages")
    chat = tokenizer.chat(CONVERSATION)
    assert documents.tokens(0, len(documents)).tolist() == chat.ids.tolist()
    assert documents.learned(0, len(documents)).tolist() == chat.learned.tolist()
    assert documents.ends().tolist() == [len(chat.ids)]


def test_the_same_documents_come_as_a_stream(write, build_dataset, chat_tokenizer) -> None:
    tokenizer = chat_tokenizer(LLAMA)
    folder = write("jsonl", rows_of(CONVERSATION, CONVERSATION[1:3], CONVERSATION[:2], CONVERSATION))
    whole = build_dataset(folder, tokenizer, messages="messages")
    stream = build_dataset(folder, tokenizer, messages="messages", streaming=True, lanes=1).read(0, None)
    streamed = [next(stream) for _ in range(3)]
    assert np.concatenate([document.tokens for document in streamed]).tolist() == whole.tokens(0, len(whole)).tolist()
    assert np.concatenate([d.learned for d in streamed]).tolist() == whole.learned(0, len(whole)).tolist()


def test_conversations_without_an_answer_are_left_out(write, build_dataset, chat_tokenizer) -> None:
    rows = rows_of(CONVERSATION[:2], CONVERSATION, [], None)
    assert len(build_dataset(write("jsonl", rows), chat_tokenizer(CHATML), messages="messages").ends()) == 1


def test_a_dataset_without_any_answer_is_an_error(write, build_dataset, chat_tokenizer) -> None:
    rows = rows_of([role_and_content("user", "hi"), role_and_content("model", "ho")])
    folder = write("jsonl", rows)
    with refuses("", repr(folder), "'train'", "none of 1", "assistant"):
        build_dataset(folder, chat_tokenizer(CHATML), messages="messages")


def test_keys_that_only_other_rows_have_do_not_reach_the_template(write, build_dataset, chat_tokenizer) -> None:
    template = CHATML.replace("message.content +", "(message.content if message.calls is not defined else 'called') +")
    plain = [role_and_content("user", "hi"), role_and_content("assistant", "yo")]
    called = [role_and_content("user", "hi"), {"role": "assistant", "calls": [{"name": "f", "x": 1}, {"name": "g"}]}]
    tokenizer = chat_tokenizer(template)
    documents = build_dataset(write("parquet", rows_of(plain, called)), tokenizer, messages="messages")
    chats = [tokenizer.chat(plain), tokenizer.chat(called)]
    assert len(documents) == sum(len(chat.ids) + 1 for chat in chats)
    assert [text for chat in chats for text in learned_texts(tokenizer, chat)] == ["yo<|im_end|>", "called<|im_end|>"]


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_of_a_row_reach_the_template(write, build_dataset, chat_tokenizer, as_text: bool) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    rows = [{"messages": CONVERSATION, "tools": json.dumps(tools) if as_text else tools}]
    tokenizer = chat_tokenizer(CHATML)
    documents = build_dataset(write("jsonl", rows), tokenizer, messages="messages", tools="tools")
    assert len(documents) == len(tokenizer.chat(CONVERSATION, tools).ids) + 1


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"messages": "hi"}, ["'messages'", "str 'hi'"]),
        (
            {"messages": [{"from": "gpt", "value": "hi"}]},
            ["message 0", "'messages'", "'from', 'value'", "'role'", "'content'"],
        ),
        ({"messages": [{"role": "user"}]}, ["message 0", "'messages'", "'role'", "'content'"]),
        ({"messages": CONVERSATION, "tools": "look"}, ["'tools'", "JSON"]),
        ({"messages": CONVERSATION, "tools": '{"name": "look"}'}, ["'tools'", "dict"]),
    ],
)
def test_a_row_that_is_no_conversation_is_an_error_that_names_it(
    write, build_dataset, chat_tokenizer, row: dict[str, Any], facts: list[str]
) -> None:
    folder, tools = write("jsonl", [row]), "tools" if "tools" in row else ""
    with refuses("", "row 0", repr(folder), "'train'", *facts):
        build_dataset(folder, chat_tokenizer(CHATML), messages="messages", tools=tools)


def test_a_template_that_fails_on_a_row_names_it(write, build_dataset, chat_tokenizer) -> None:
    folder = write("jsonl", rows_of(CONVERSATION))
    with refuses("", "row 0", repr(folder), "'train'", "message 2"):
        build_dataset(folder, chat_tokenizer(FORGETFUL), messages="messages")


def test_chats_need_a_tokenizer_with_a_template(write, build_dataset, problems, pretrained) -> None:
    folder = write("jsonl", rows_of(CONVERSATION))
    with refuses("", "messages", "[data.tokenizer]", 'type = "auto"'):
        build_dataset(folder, messages="messages")
    chats = HuggingFace(path=folder, messages="messages")
    check_problems(problems(chats), at("messages", "[data.tokenizer]", 'type = "auto"'))
    assert problems(chats, component=Auto(path=pretrained(CHATML))) == []


def test_another_template_has_its_own_token_files(write, build_dataset, chat_tokenizer, caches: Path) -> None:
    folder = write("jsonl", rows_of(CONVERSATION))
    for template in (CHATML, CHATML_MARKED, CHATML):
        build_dataset(folder, chat_tokenizer(template), messages="messages")
    assert len(list((caches / "tokens").iterdir())) == 2
