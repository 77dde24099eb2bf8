"""Datasets `interleaved` and `image_chat`: images in their places, only answers learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
from attrs import frozen
from PIL import Image

from forge_core import JobError
from forge_plugin_images import ImageChat, Interleaved, RenderedText
from forge_plugin_text import Bytes
from forge_plugin_text.bytes import ByteTokenizer
from forge_plugin_vision import IMAGE
from forge_testing.images import tiny_model
from forge_testing.refusals import at, check_problems, lacks, problems_of, refuses

END = 256
MODEL = tiny_model(8, 16, images_per_sequence=3)
TEXTS_ONLY = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
WITH_IMAGES = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- for part in message.content %}{{- '<|image|>' if part.type == 'image' else part.text }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def write(folder: Path, *records: dict[str, Any]) -> str:
    for number in range(3):
        Image.new("RGB", (16, 8), (50 * number + 50, 0, 0)).save(folder / f"{number}.png")
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder / "records.jsonl")


def reds(row) -> list[int]:
    """The red of each image of a row."""
    return [int(patch[0]) for patch in row["patches"][::2] if patch.any()]


# --- interleaved ----------------------------------------------------------------------------------------------------

CONTENTS = {
    "a text with marks": {"content": "ab<image>c<image>", "images": ["0.png", "1.png"]},
    "parallel lists, as in OBELICS": {"content": ["ab", None, "c", None], "images": [None, "0.png", None, "1.png"]},
    "entries with their images": {
        "content": [
            "ab",
            {"type": "image", "image": "0.png"},
            "c",
            {"type": "image_url", "image_url": {"url": "1.png"}},
        ]
    },
    "entries, and a list": {
        "content": [{"type": "text", "text": "ab"}, {"type": "image"}, "c<image>"],
        "images": ["0.png", "1.png"],
    },
}


@pytest.mark.parametrize("record", CONTENTS.values(), ids=list(CONTENTS))
def test_images_stand_where_the_document_has_them_and_all_tokens_are_learned(build, tmp_path, record):
    row = build(Interleaved(path=write(tmp_path, record)), model=MODEL)[0]
    assert list(row["input_ids"][:7]) == [*b"ab", IMAGE, IMAGE, *b"c", IMAGE, IMAGE]
    assert list(row["labels"][:8]) == [*b"b", -100, -100, *b"c", -100, -100, END, -100]
    assert reds(row) == [50, 100]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"content": "a<image>b<image>", "images": ["0.png"]},
            "its texts refer to more images than the 1 of 'images'",
        ),
        ({"content": "a", "images": ["0.png"]}, ":1: 'images' lists 1 images, and its texts refer to 0; write <image>"),
        ({"content": [7]}, ":1: '7' is neither a text nor a list"),
        ({"content": [{"type": "sound"}]}, ":1: .*sound.* is no part of a content; known are type 'text'"),
        ({"content": [{"type": "video", "video": "a.mp4"}]}, r":1: it has a video, .*; add \[data.sources.video\]"),
        ({"content": [{"type": "video"}]}, r":1: it has a video, .*; add \[data.sources.video\]"),
        ({"content": "<video>", "videos": ["a.mp4"]}, r":1: it has a video, .*; add \[data.sources.video\]"),
        ({"text": "a"}, ":1: no key 'content', but 'text'; set `content`"),
    ],
)
def test_a_document_that_does_not_fit_its_images_is_named(build, tmp_path, record, message):
    with pytest.raises(JobError, match=message):
        build(Interleaved(path=write(tmp_path, record)), model=MODEL)


def test_the_tag_of_a_video_is_text_where_there_are_none(build, tmp_path):
    row = build(Interleaved(path=write(tmp_path, {"content": "a<video>"})), model=MODEL)[0]
    assert bytes(row["input_ids"][:8].tolist()) == b"a<video>"


def test_a_document_is_cut_before_an_image_that_does_not_fit(build, tmp_path):
    path = write(tmp_path, {"content": "abcd<image>ef<image>gh", "images": ["0.png", "1.png"]})
    row = build(Interleaved(path=path, too_long="cut"), model=MODEL, seq_len=8)[0]
    assert list(row["input_ids"]) == [*b"abcd", IMAGE, IMAGE, *b"e", END]
    assert reds(row) == [50]


# --- chats ----------------------------------------------------------------------------------------------------------


ASKED = "<image>\nand <image>?"
CHATS = {
    "messages with a list of images": {
        "messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "red"}],
        "images": ["0.png", "1.png"],
    },
    "LLaVA's": {
        "messages": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": "red"}],
        "images": ["0.png", "1.png"],
    },
    "OpenAI's": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": "0.png"},
                    {"type": "text", "text": "\nand "},
                    {"type": "image_url", "image_url": {"url": "1.png"}},
                    {"type": "text", "text": "?"},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "red"}]},
        ]
    },
}


@pytest.mark.parametrize(("template", "token"), [(TEXTS_ONLY, ""), (WITH_IMAGES, "<|image|>")], ids=["texts", "images"])
@pytest.mark.parametrize("record", CHATS.values(), ids=list(CHATS))
def test_a_chat_is_the_templates_text_with_images_in_it_and_only_answers_are_learned(
    build, tmp_path, tokenizer, template, token, record
):
    auto = tokenizer(template)
    row = build(
        ImageChat(path=write(tmp_path, record), image_token=token), model=MODEL, seq_len=64, data={"tokenizer": auto}
    )[0]
    encode = auto.build(None, None)._with_special_tokens.encode
    asked, answer = encode("<|im_start|>user\n").ids, encode("red<|im_end|>").ids
    between, after = encode("\nand ").ids, encode("?<|im_end|>\n<|im_start|>assistant\n").ids
    expected = [*asked, IMAGE, IMAGE, *between, IMAGE, IMAGE, *after, *answer, *encode("\n").ids]
    assert list(row["input_ids"][: len(expected)]) == expected
    assert [label for label in row["labels"] if label >= 0] == answer
    first = len(expected) - 1 - len(answer)
    assert row["labels"][first - 1] == answer[0]  # the position before the answer predicts its first token
    assert reds(row) == [50, 100]


def test_an_answer_right_after_an_image_is_predicted_by_the_image(build, tmp_path, tokenizer):
    template = "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
    record = {"messages": [{"role": "assistant", "content": "<image>red"}], "images": "0.png"}
    keys = {"model": MODEL, "data": {"tokenizer": tokenizer(template)}}
    row = build(ImageChat(path=write(tmp_path, record)), **keys)[0]
    assert list(row["input_ids"][:2]) == [IMAGE, IMAGE]
    assert row["labels"][0] == -100
    assert (row["labels"][1:4] == row["input_ids"][2:5]).all()


def test_chats_without_answers_are_left_out(build, tmp_path, tokenizer):
    asks = {"messages": [{"role": "user", "content": "<image>?"}], "images": ["0.png"]}
    path = write(tmp_path, asks, CHATS["LLaVA's"])
    data = build(ImageChat(path=path), model=MODEL, seq_len=64, data={"tokenizer": tokenizer(TEXTS_ONLY)})
    assert len(data) == 1
    assert not lacks(data.describe(), 1, "left out")


def test_a_template_that_writes_another_number_of_images_is_refused(build, tmp_path, tokenizer):
    keys = {"model": MODEL, "seq_len": 64, "data": {"tokenizer": tokenizer(WITH_IMAGES)}}
    with refuses("data.sources.0", ":1", 2, "'<pad>'", 0, "image_token"):
        build(ImageChat(path=write(tmp_path, CHATS["LLaVA's"]), image_token="<pad>"), **keys)


def test_a_text_that_has_the_mark_of_an_image_is_named_or_left_out(build, tmp_path, tokenizer):
    typed = {"messages": [{"role": "user", "content": "what is <|image|>?"}, {"role": "assistant", "content": "it"}]}
    path = write(tmp_path, CHATS["LLaVA's"], typed)
    keys = {"model": MODEL, "seq_len": 64, "data": {"tokenizer": tokenizer(WITH_IMAGES)}}
    with refuses("data.sources.0.unreadable", "records.jsonl:2", "'<|image|>'", "image_token", "1 of 2"):
        build(ImageChat(path=path, image_token="<|image|>"), **keys)
    skipping = ImageChat(path=path, image_token="<|image|>", unreadable="skip", max_unreadable=0.5)
    assert len(build(skipping, **keys)) == 1


def test_a_tokenizer_without_a_template_and_what_is_no_chat_are_refused(build, make_job, tmp_path, tokenizer):
    path = write(tmp_path, {"messages": [{"text": "a"}]})
    check_problems(problems_of(make_job(ImageChat(path=path))), at("data.sources.0.messages", "[data.tokenizer]"))
    with refuses("data.sources.0", ":1", "'text'", "'role'", "'content'"):
        build(ImageChat(path=path), model=MODEL, data={"tokenizer": tokenizer(TEXTS_ONLY)})


@frozen(kw_only=True)
class Promises(Bytes):
    """A tokenizer that has no template after all."""

    chats: ClassVar[bool] = True


def test_a_tokenizer_without_the_template_that_it_promises_is_refused(build, tmp_path):
    path = write(tmp_path, CHATS["LLaVA's"])
    with refuses("data.sources.0.messages", "[data.tokenizer]"):
        build(ImageChat(path=path), model=MODEL, data={"tokenizer": Promises()})


@pytest.mark.parametrize("messages", [[], "hello", ["hello"]])
def test_what_is_no_list_of_messages_is_named(build, tmp_path, tokenizer, messages):
    path = write(tmp_path, CHATS["LLaVA's"], {"messages": messages})
    with refuses("data.sources.0", ":2", repr(str(messages))):
        build(ImageChat(path=path), model=MODEL, seq_len=64, data={"tokenizer": tokenizer(TEXTS_ONLY)})


def test_what_a_template_refuses_is_named_by_its_record(build, tmp_path, tokenizer):
    strict = "{%- if messages[0].role == 'system' %}{{ raise_exception('no system') }}{%- endif %}" + TEXTS_ONLY
    messages = [{"role": "system", "content": "be kind"}, {"role": "assistant", "content": "I am"}]
    path = write(tmp_path, {"messages": messages})
    with refuses("data.sources.0", "records.jsonl:1", "no system"):
        build(ImageChat(path=path), model=MODEL, seq_len=64, data={"tokenizer": tokenizer(strict)})


def test_images_and_videos_have_marks_of_their_own(make_job, tmp_path):
    def problems(**tokens):
        job = make_job(ImageChat(path=write(tmp_path, CHATS["LLaVA's"]), **tokens))
        return [problem for problem in problems_of(job) if problem.path == "data.sources.0.video_token"]

    assert problems() == []
    key = "data.sources.0.video_token"
    table = at(key, "[data.sources.video]")
    check_problems(problems(image_token="<a>", video_token="<b>"), table)
    check_problems(problems(image_token="<a>", video_token="<a>"), table, at(key, "'<a>'", "image_token"))


# --- the beginning of text -------------------------------------------------------------------------------------------


@pytest.fixture
def begins(monkeypatch) -> list[int]:
    """The tokenizer `bytes` asks for two ids before every document."""
    monkeypatch.setattr(ByteTokenizer, "begin_of_text", [7, 8], raising=False)
    return [7, 8]


def test_a_document_begins_as_the_tokenizer_asks_and_that_is_not_learned(build, tmp_path, begins):
    row = build(Interleaved(path=write(tmp_path, {"content": "<image>ab", "images": ["0.png"]})), model=MODEL)[0]
    assert list(row["input_ids"][:6]) == [*begins, IMAGE, IMAGE, *b"ab"]
    assert list(row["labels"][:6]) == [-100, -100, -100, *b"ab", END]


def test_a_drawn_word_begins_as_the_tokenizer_asks(build, begins):
    words = RenderedText(held_out=2, length=(3, 3), text_size=(5, 5))
    row = build(words, model=tiny_model(), seq_len=24)[0]
    assert list(row["input_ids"][:3]) == [*begins, IMAGE]
    assert row["labels"][0] == -100


@pytest.mark.parametrize("template", [TEXTS_ONLY, "{{- bos_token }}" + TEXTS_ONLY], ids=["without it", "writes it"])
def test_a_chat_begins_once(build, tmp_path, tokenizer, template):
    messages = [{"role": "user", "content": "<image>a"}, {"role": "assistant", "content": "b"}]
    auto = tokenizer(template, bos_token="<|image|>")
    data = {"tokenizer": attrs.evolve(auto, begin_of_text="<|image|>")}
    source = ImageChat(path=write(tmp_path, {"messages": messages, "images": ["0.png"]}))
    row = build(source, model=tiny_model(8, 16, images_per_sequence=3), seq_len=64, data=data)[0]
    begin = row["input_ids"][0]
    assert (row["input_ids"] == begin).sum() == 1
    assert row["labels"][0] == -100
