"""Videos in chats and documents: where they stand, and as Qwen's templates write them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from video_rows import frames, shown

from forge_plugin_huggingface import Auto
from forge_plugin_images import ImageChat, Interleaved
from forge_plugin_vision import IMAGE, VIDEO
from forge_testing.refusals import at, check_problems, problems_of, refuses

PADS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SWAPPED = QWEN.replace("message.content -%}", "message.content | sort(attribute='type', reverse=true) -%}")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """(template) -> a tokenizer of bytes with Qwen's special tokens."""

    def make(template=QWEN):
        folder = str(tmp_path_factory.mktemp("tokenizer"))
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
        fast = PreTrainedTokenizerFast(
            tokenizer_object=inner, eos_token="<|endoftext|>", additional_special_tokens=list(PADS)
        )
        fast.chat_template = template
        fast.save_pretrained(folder)
        return Auto(path=folder)

    return make


@pytest.fixture
def chat(clips):
    """A conversation of two turns: an image and a part of a clip, then another clip."""
    Image.fromarray(np.full((8, 16, 3), 90, np.uint8)).save(clips / "red.png")
    record = {
        "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "video", "start": 2, "end": 3}, "what?"]},
            {"role": "assistant", "content": "it"},
            {"role": "user", "content": "and <video>?"},
            {"role": "assistant", "content": "that"},
        ],
        "images": ["red.png"],
        "videos": ["a.mp4", "b.mp4"],
    }
    (clips / "chat.jsonl").write_text(json.dumps(record))
    return str(clips / "chat.jsonl")


def text(ids, auto):
    """Entries as text, with `@` and `#` for positions of images and of videos."""
    decode = auto.build(None, None)._with_special_tokens.decode
    return "".join({IMAGE: "@", VIDEO: "#"}.get(id_) or decode([id_], skip_special_tokens=False) for id_ in ids)


@pytest.mark.parametrize("tokens", [{"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}, {}], ids=str)
def test_several_clips_stand_where_the_turns_have_them(build, chat, tokenizer, tokens):
    auto = tokenizer()
    source = ImageChat(path=chat, video=frames(2), **tokens)
    row = build(source, data={"tokenizer": auto}, seq_len=200)[0]
    begin, end = ("<|vision_start|>", "<|vision_end|>") if tokens else ("", "")
    image, clip = f"{begin}@@{end}", f"{begin}{'#' * 24}{end}"
    assert text(row["input_ids"], auto).replace("<|endoftext|>", "") == (
        f"<|im_start|>user\n{image}{clip}what?<|im_end|>\n<|im_start|>assistant\nit<|im_end|>\n"
        f"<|im_start|>user\nand {clip}?<|im_end|>\n<|im_start|>assistant\nthat<|im_end|>\n"
    )
    assert row["grids"].tolist() == [[1, 1, 2], [2, 2, 6], [2, 2, 6]]
    assert shown(row)[1:] == [[8, 11], [0, 15]]
    assert row["grid_seconds"].tolist() == [0, 0.75, 3.75]
    assert text([label for label in row["labels"] if label >= 0], auto) == "it<|im_end|>that<|im_end|>"


def test_times_are_written_as_by_qwen3_vls_processor(build, chat, tokenizer):
    auto = tokenizer()
    source = ImageChat(
        path=chat,
        video=frames(
            3, timestamps="text", timestamp_format="<{seconds:.1f} seconds><|vision_start|>{frame}<|vision_end|>"
        ),
        image_token="<|image_pad|>",
        video_token="<|vision_start|><|video_pad|><|vision_end|>",
    )
    row = build(source, data={"tokenizer": auto}, seq_len=240)[0]
    processor = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    expected = "".join(
        f"<{time:.1f} seconds><|vision_start|>{'#' * 12}<|vision_end|>"
        for time in processor._calculate_timestamps([0, 7, 15], 4.0, 1)
    )
    assert f"and {expected}?" in text(row["input_ids"], auto)
    special = auto.build(None, None)._with_special_tokens.token_to_id
    assert (row["input_ids"] == special("<|vision_start|>")).sum() == 1 + 3 + 3


def test_a_template_that_changes_the_order_of_images_and_videos_is_refused(build, chat, tokenizer):
    source = ImageChat(path=chat, video=frames(2), image_token="<|image_pad|>", video_token="<|video_pad|>")
    with refuses("data.sources.0", "chat.jsonl:1", "order"):
        build(source, data={"tokenizer": tokenizer(SWAPPED)}, seq_len=200)


def test_a_document_has_images_and_videos_in_its_order(build, clips, tokenizer):
    Image.fromarray(np.full((8, 16, 3), 90, np.uint8)).save(clips / "red.png")
    record = {"content": "a<video>b<image>c", "images": ["red.png"], "videos": [{"path": "c.mp4", "start": 3}]}
    (clips / "document.jsonl").write_text(json.dumps(record))
    row = build(Interleaved(path=str(clips / "document.jsonl"), video=frames(2)))[0]
    written = "".join({IMAGE: "@", VIDEO: "#"}.get(id_) or chr(id_) for id_ in row["input_ids"])
    assert written.rstrip(chr(256)) == "a" + "#" * 24 + "b@@c"
    assert shown(row)[0] == [12, 15]


def test_keys_of_videos_without_a_table_are_refused(make_job, chat, tokenizer):
    job = make_job(ImageChat(path=chat, video_token="<|video_pad|>"), data={"tokenizer": tokenizer()})
    of_source = [problem for problem in problems_of(job) if problem.path.startswith("data.sources")]
    check_problems(of_source, at("data.sources.0.video_token", "[data.sources.video]"))
