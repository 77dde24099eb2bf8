"""Supervised fine-tuning: prompts with completions, messages that are left out of the loss, and long documents."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import datasets
import pytest

from forge_core.contracts.errors import JobError
from forge_plugin_huggingface import Auto, HuggingFace
from forge_testing.refusals import at, check_problems, refuses

CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
MARKED = (
    "{%- for message in messages %}{%- if message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
FORGETFUL = CHATML.replace("message.content +", "(message.content if loop.last else message.content[:3]) +")
THOUGHTLESS = (
    "{%- set last = namespace(user=0) %}{%- for message in messages if message.role == 'user' %}"
    "{%- set last.user = messages.index(message) %}{%- endfor %}"
) + CHATML.replace("message.content +", "(message.content if loop.index0 >= last.user else message.content[-3:]) +")
"""As templates that drop the thoughts of turns before the last question."""
STYLES = {"unmarked": CHATML, "marked": MARKED}


def system(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "system", "content": content, **more}


def user(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CHAT = [user("one?"), assistant("first"), user("two?"), assistant("second"), user("three?"), assistant("third")]


@pytest.fixture
def chat_tokenizer(pretrained, auto) -> Callable[[str], Any]:
    return lambda template: auto(pretrained(template))


@pytest.fixture
def read(write, build_dataset) -> Callable[..., Any]:
    """Reads rows whole: (rows, tokenizer, keys) -> documents."""

    def run(rows: Sequence[Mapping[str, Any]], tokenizer: Any = None, format_: str = "jsonl", **keys: Any) -> Any:
        return build_dataset(write(format_, rows), tokenizer, **keys)

    return run


@pytest.fixture
def streamed(write, build_dataset) -> Callable[..., list[Any]]:
    """Reads rows as a stream: (rows, count, tokenizer, keys) -> its first documents."""

    def run(rows: Sequence[Mapping[str, Any]], count: int, tokenizer: Any = None, **keys: Any) -> list[Any]:
        stream = build_dataset(write("jsonl", rows), tokenizer, streaming=True, lanes=1, **keys).read(0, None)
        return [next(stream) for _ in range(count)]

    return run


def parts_of(documents: Any) -> list[tuple[list[int], list[bool]]]:
    """Ids and masks of the documents of a token file."""
    ends = documents.ends().tolist()
    spans = zip([0, *ends[:-1]], ends, strict=True)
    return [(documents.tokens(a, b).tolist(), documents.learned(a, b).tolist()) for a, b in spans]


def learned_of(document: tuple[list[int], list[bool]]) -> str:
    """The learned bytes of a document of `Letters`; 256 is shown as `$`."""
    return "".join(chr(id_) if id_ < 256 else "$" for id_, learned in zip(*document, strict=True) if learned)


def learned_texts(tokenizer: Any, ids: Sequence[int], mask: Sequence[bool]) -> list[str]:
    runs = groupby(zip(ids, mask, strict=True), key=lambda token: token[1])
    decode = tokenizer._pretrained.decode
    return [decode([id_ for id_, _ in run], skip_special_tokens=False) for learned, run in runs if learned]


# --- prompt and completion ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_", ["jsonl", "parquet", "saved"])
def test_of_two_texts_the_completion_and_the_end_of_text_are_learned(read, texts_of, format_: str) -> None:
    rows = [{"q": "ask ", "a": "tell"}, {"q": "", "a": "alone"}, {"q": None, "a": "none"}]
    documents = read(rows, format_=format_, prompt="q", completion="a")
    assert texts_of(documents) == ["ask tell", "alone", "none"]
    assert [learned_of(part) for part in parts_of(documents)] == ["tell$", "alone$", "none$"]


def test_the_same_documents_come_as_a_stream(read, streamed) -> None:
    rows = [{"q": f"ask {number} ", "a": "tell" * number} for number in range(4)]
    whole = parts_of(read(rows, prompt="q", completion="a"))
    found = streamed(rows, 3, prompt="q", completion="a")
    assert [(document.tokens.tolist(), document.learned.tolist()) for document in found] == whole


def test_rows_without_a_completion_are_left_out_and_counted(read) -> None:
    rows = [{"q": "a", "a": "b"}, {"q": "a", "a": ""}, {"q": "a", "a": None}]
    documents = read(rows, prompt="q", completion="a")
    assert len(documents.ends()) == 1
    assert documents.describe() == "1 document, 66.7% of 3 tokens learned; 2 rows with nothing to learn left out"


def test_a_prompt_has_the_tokens_that_it_has_by_itself(read, chat_tokenizer) -> None:
    """`hello wor` and `ld` join to a token of the BPE that spans both; at inference the prompt is encoded alone."""
    tokenizer = chat_tokenizer(CHATML)
    prompt, completion = tokenizer.encode("hello wor"), tokenizer.encode("ld")
    assert tokenizer.encode("hello world") != [*prompt, *completion]
    ((ids, mask),) = parts_of(read([{"q": "hello wor", "a": "ld"}], tokenizer, prompt="q", completion="a"))
    assert ids == [*prompt, *completion, tokenizer.end_of_text]
    assert mask == [False] * len(prompt) + [True] * (len(completion) + 1)


def test_a_tokenizer_that_puts_a_space_before_texts_does_not_put_it_between_the_two(read, letters) -> None:
    class Spaced(type(letters)):  # type: ignore[misc]
        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            return [list(f" {text}".encode()) for text in texts]

    ((ids, mask),) = parts_of(read([{"q": "a", "a": "b"}], Spaced(), prompt="q", completion="a"))
    assert bytes(ids[:-1]) == b" ab"
    assert mask == [False, False, True, True]


@pytest.mark.parametrize("style", STYLES)
def test_of_two_lists_of_messages_the_answers_of_the_completion_are_learned(read, chat_tokenizer, style: str) -> None:
    tokenizer = chat_tokenizer(STYLES[style])
    rows = [{"q": CHAT[:3], "a": [CHAT[3]]}, {"q": CHAT[:1], "a": CHAT[1:4]}]
    parts = parts_of(read(rows, tokenizer, prompt="q", completion="a"))
    assert [ids[:-1] for ids, _ in parts] == [tokenizer.chat(CHAT[:4]).ids.tolist()] * 2
    texts = [learned_texts(tokenizer, *part) for part in parts]
    assert texts == [["second<|im_end|>"], ["first<|im_end|>", "second<|im_end|>"]]


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"q": "a", "a": ["b"]}, ["'q'", "str 'a'", "'a'", "list"]),
        ({"q": [{"role": "user", "content": "a"}], "a": "b"}, ["'q'", "list", "'a'", "str 'b'"]),
        ({"q": "a", "a": 7}, ["'a'", "int", "'7'"]),
        ({"q": ["x"], "a": ["b"]}, ["'q'", "list of messages"]),
    ],
)
def test_a_row_of_another_kind_is_named(read, chat_tokenizer, row: dict[str, Any], facts: list[str]) -> None:
    with refuses("", "row 0", "'train'", *facts):
        read([row], chat_tokenizer(CHATML), prompt="q", completion="a")


def test_lists_of_messages_need_a_tokenizer_with_a_template(read) -> None:
    with refuses("", "row 0", "'a'", "[data.tokenizer]", "auto"):
        read([{"q": CHAT[:1], "a": CHAT[1:2]}], prompt="q", completion="a")


def test_texts_of_prompts_and_completions_train_a_tokenizer(write) -> None:
    folder = write("jsonl", [{"q": "ask ", "a": "tell"}])
    assert list(HuggingFace(path=folder, prompt="q", completion="a").documents()) == ["ask tell"]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"prompt": "q"}, at("completion", "prompt", "'q'")),
        ({"completion": "a"}, at("prompt", "completion", "'a'")),
        ({"prompt": "q", "completion": "q"}, at("completion", "'q'")),
        ({"prompt": "q", "completion": "a", "field": "body"}, at("field", "'body'", "'q'", "'a'")),
        ({"prompt": "q", "completion": "a", "messages": "chat"}, at("prompt", "messages", "'chat'")),
        ({"completion": "a", "messages": "chat"}, at("completion", "messages", "'chat'")),
        ({"learn": "last"}, at("learn", "messages")),
        ({"tools": "t"}, at("tools", "messages")),
    ],
)
def test_wrong_combinations_of_keys_are_refused_at_the_check(
    write, problems, pretrained, keys: dict[str, Any], problem: Any
) -> None:
    dataset = HuggingFace(path=write("jsonl", [{"text": "a"}]), **keys)
    check_problems(problems(dataset, component=Auto(path=pretrained(CHATML))), problem)


# --- which messages are learned -------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}, {"weight": 0.0}, {"train": False, "weight": 0}])
def test_an_answer_with_train_false_or_weight_0_is_not_learned(
    read, chat_tokenizer, style: str, flag: dict[str, Any]
) -> None:
    tokenizer = chat_tokenizer(STYLES[style])
    chat = [*CHAT[:3], CHAT[3] | flag, *CHAT[4:]]
    ((ids, mask),) = parts_of(read([{"messages": chat}], tokenizer, messages="messages"))
    assert ids[:-1] == tokenizer.chat(CHAT).ids.tolist()
    assert learned_texts(tokenizer, ids, mask) == ["first<|im_end|>", "third<|im_end|>"]


def test_weights_of_1_change_nothing(read, chat_tokenizer) -> None:
    tokenizer = chat_tokenizer(CHATML)
    chat = [message | {"weight": 1} for message in CHAT]
    ((_, mask),) = parts_of(read([{"messages": chat}], tokenizer, messages="messages"))
    assert mask[:-1] == tokenizer.chat(CHAT).learned.tolist()


@pytest.mark.parametrize(
    ("flag", "facts"),
    [
        ({"weight": 0.5}, ["weight = 0.5"]),
        ({"weight": True}, ["weight = True"]),
        ({"train": "no"}, ["train = 'no'"]),
        ({"train": True, "weight": 0}, ["train = true", "weight = 0"]),
        ({"train": False, "weight": 1}, ["train = false", "weight = 1"]),
    ],
)
def test_other_values_are_refused_with_their_place(
    read, chat_tokenizer, flag: dict[str, Any], facts: list[str]
) -> None:
    rows = [{"messages": CHAT}, {"messages": [CHAT[0], CHAT[1] | flag]}]
    with refuses("", "row 1", "message 1", "'messages'", *facts):
        read(rows, chat_tokenizer(CHATML), messages="messages")


@pytest.mark.parametrize("style", STYLES)
def test_another_message_with_train_true_is_learned_from_its_content_to_the_end_of_its_turn(
    read, chat_tokenizer, style: str
) -> None:
    tokenizer = chat_tokenizer(STYLES[style])
    chat = [system("be brief", train=True), *CHAT[:2], user("two?", train=True), CHAT[3]]
    ((ids, mask),) = parts_of(read([{"messages": chat}], tokenizer, messages="messages"))
    expected = ["be brief<|im_end|>", "first<|im_end|>", "two?<|im_end|>", "second<|im_end|>"]
    assert learned_texts(tokenizer, ids, mask) == expected


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("message.content +", "message.content | upper +"),
        FORGETFUL,
        CHATML.replace("message.content +", "(message.content if message.role != 'user' else '') +"),
    ],
)
def test_where_a_template_does_not_show_its_content_train_true_is_refused(read, chat_tokenizer, template: str) -> None:
    rows = [{"messages": [user("hello", train=True), assistant("HI", train=False)]}]
    with refuses("", "row 0", "message 0", "'user'", "train"):
        read(rows, chat_tokenizer(template), messages="messages")


@pytest.mark.parametrize("style", STYLES)
def test_only_the_last_turn_is_learned_if_that_is_asked_for(read, chat_tokenizer, style: str) -> None:
    tokenizer = chat_tokenizer(STYLES[style])
    tools = [user("go"), assistant("call"), {"role": "tool", "content": "42"}, assistant("it is 42"), user("thanks")]
    rows = [{"messages": CHAT}, {"messages": tools}, {"messages": [*CHAT[:3], CHAT[3] | {"train": False}]}]
    parts = parts_of(read(rows, tokenizer, messages="messages", learn="last"))
    assert [learned_texts(tokenizer, *part) for part in parts] == [
        ["third<|im_end|>"],
        ["call<|im_end|>", "it is 42<|im_end|>"],
    ]


def test_the_last_turn_can_be_learned_where_a_template_rewrites_the_earlier_ones(read, chat_tokenizer) -> None:
    tokenizer = chat_tokenizer(THOUGHTLESS)
    with refuses("", "row 0", "message 1", "chat_template", 'learn = "last"'):
        read([{"messages": CHAT}], tokenizer, messages="messages")
    ((ids, mask),) = parts_of(read([{"messages": CHAT}], tokenizer, messages="messages", learn="last"))
    assert learned_texts(tokenizer, ids, mask) == ["third<|im_end|>"]


def test_where_marks_do_not_show_whose_they_are_a_choice_is_refused(read, chat_tokenizer) -> None:
    """Some published templates mark only the answer that is the last."""
    template = MARKED.replace("message.role == 'assistant'", "message.role == 'assistant' and loop.last")
    tokenizer = chat_tokenizer(template)
    assert len(parts_of(read([{"messages": CHAT}], tokenizer, messages="messages"))) == 1
    with refuses("", "row 0", "generation", "chat_template"):
        read([{"messages": [*CHAT[:5], CHAT[5] | {"train": False}, *CHAT]}], tokenizer, messages="messages")


# --- documents longer than a sequence -------------------------------------------------------------------------------

LONG = [{"q": "ab", "a": "c"}, {"q": "ab", "a": "cdef"}, {"q": "abcdef", "a": "g"}, {"q": "ab", "a": "cd"}]
"""Documents of 3, 6, 7 and 4 tokens; `train.seq_len` is 4 in these tests."""


@pytest.mark.parametrize(
    ("too_long", "expected", "described"),
    [
        ("keep", ["abc", "abcdef", "abcdefg", "abcd"], "4 documents, 50.0% of 24 tokens learned"),
        ("drop", ["abc", "abcd"], "2 documents, 55.6% of 9 tokens learned; 2 rows longer than train.seq_len dropped"),
        (
            "truncate",
            ["abc", "abcd", "abcd"],
            "3 documents, 50.0% of 14 tokens learned; 1 row longer than train.seq_len dropped; "
            "1 truncated to train.seq_len",
        ),
    ],
)
def test_documents_longer_than_a_sequence(
    read, streamed, texts_of, too_long: str, expected: list[str], described: str
) -> None:
    documents = read(LONG, prompt="q", completion="a", too_long=too_long)
    assert texts_of(documents) == expected
    assert documents.describe() == described
    found = streamed(LONG, len(expected), prompt="q", completion="a", too_long=too_long)
    assert [(document.tokens.tolist(), document.learned.tolist()) for document in found] == parts_of(documents)


def test_the_end_of_a_truncated_document_is_not_learned(read) -> None:
    parts = parts_of(read(LONG, prompt="q", completion="a", too_long="truncate"))
    assert [learned_of(part) for part in parts] == ["c$", "cd", "cd$"]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_first_row_that_is_too_long_is_named(write, build_dataset, streaming: bool) -> None:
    folder = write("jsonl", LONG)
    keys = {"streaming": True, "lanes": 1} if streaming else {}
    with refuses("", "row 1", "'train'", "6 tokens", "train.seq_len = 4", "too_long"):
        built = build_dataset(folder, prompt="q", completion="a", too_long="error", **keys)
        list(zip(built.read(0, None), range(4), strict=False))


def test_of_a_dataset_with_only_long_rows_the_error_says_so(read) -> None:
    with refuses("", "none of 2 rows", "2 rows longer than train.seq_len"):
        read(LONG[1:3], prompt="q", completion="a", too_long="drop")


def test_texts_are_truncated_too_and_their_bytes_with_them(read, texts_of) -> None:
    documents = read([{"text": "abcdefgh"}, {"text": "ab"}], too_long="truncate")
    assert texts_of(documents) == ["abcd", "ab"]
    assert [learned_of(part) for part in parts_of(documents)] == ["abcd", "ab$"]
    assert documents.bytes_per_token == pytest.approx(6 / 8)


def test_each_choice_has_its_own_token_files(write, build_dataset, caches: Path) -> None:
    folder = write("jsonl", LONG)
    for too_long in ("keep", "drop", "truncate", "drop"):
        build_dataset(folder, prompt="q", completion="a", too_long=too_long)
    assert len(list((caches / "tokens").iterdir())) == 3


def test_caches_of_earlier_versions_have_no_counts(write, build_dataset, caches: Path) -> None:
    folder = write("jsonl", LONG)
    build_dataset(folder, prompt="q", completion="a")
    (manifest,) = (caches / "tokens").glob("*/manifest.json")
    content = json.loads(manifest.read_text())
    del content["info"]["row_counts"]
    manifest.write_text(json.dumps(content))
    assert build_dataset(folder, prompt="q", completion="a").describe() == ""


def test_processes_count_together(read) -> None:
    rows = [{"q": "ab", "a": "c" * (number % 5)} for number in range(600)]
    one = read(rows, prompt="q", completion="a", too_long="truncate").describe()
    datasets.disable_caching()
    two = read([*rows[1:], rows[0]], prompt="q", completion="a", too_long="truncate", processes=2).describe()
    datasets.enable_caching()
    assert one == two


# --- streams that learn nothing -------------------------------------------------------------------------------------


def test_a_stream_in_which_nothing_is_learned_ends_after_some_rows(write, build_dataset, chat_tokenizer) -> None:
    chat = [user("hi"), {"role": "model", "content": "ho"}]
    folder = write("jsonl", [{"messages": chat}] * 2100)
    stream = build_dataset(folder, chat_tokenizer(CHATML), messages="messages", streaming=True, lanes=1)
    with pytest.raises(JobError, match=r"none of the first 2,0\d\d rows has an answer of the assistant"):
        next(stream.read(0, None))


def test_a_stream_describes_the_rows_that_were_read(write, build_dataset) -> None:
    stream = build_dataset(write("jsonl", LONG), prompt="q", completion="a", too_long="drop", streaming=True, lanes=1)
    assert stream.describe() == ""
    next(stream.read(0, None))
    assert stream.describe().startswith(
        "of 4 rows that were read: 2 documents, 55.6% of 9 tokens learned; 2 rows longer"
    )
    assert stream._counts.learned == 5
