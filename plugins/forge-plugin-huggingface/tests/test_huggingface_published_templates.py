"""Masks of published chat templates: learned is what the model must generate, with the token that ends its turn.

The templates are those that TRL ships: for each family the published one and one with `{% generation %}` marks, made by
hand. What a template without marks shows must be what these marks say, and with marks the mask must be
the one that transformers computes. Without TRL (`pip install --no-deps trl`), these tests are skipped, and a few
templates remain that are written here after the formats of their families.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forge_plugin_huggingface.chat import ChatTemplate, UnclearTurns, learned_tokens
from forge_testing.refusals import refuses

ENDS = (
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|end|>",
        "<|endoftext|>",
        "<end_of_turn>",
        "<turn|>",
        "</s>",
        "<s>",
    ),
    *(
        "<|END_OF_TURN_TOKEN|>",
        "<|END_RESPONSE|>",
        "<｜end▁of▁sentence｜>",
        "<end_of_utterance>",
        "<|user|>",
        "[/INST]",
    ),
)
FAMILIES_ENDS = {"llama": "<|eot_id|>", "gemma": "<eos>", "deepseek": "<｜end▁of▁sentence｜>", "phi": "<|endoftext|>"}
"""The `eos_token` of families; that of the others is `<|im_end|>`."""

SPEC = importlib.util.find_spec("trl")
FOLDER = Path(next(iter(SPEC.submodule_search_locations or ())), "chat_templates") if SPEC else Path("nowhere")
FOR_TEXT = [
    name
    for name in sorted(path.stem.removesuffix("_training") for path in FOLDER.glob("*_training.jinja"))
    # Whose content is a list of parts, or whose text has today's date
    if name not in ("idefics3", "smolvlm", "llava_next", "muse_glimmer", "gptoss", "diffusion_gemma")
]
NEMOTRON = tuple(name for name in FOR_TEXT if name.startswith("nemotron"))
REFUSED = ("deepseek_r1_distill", "deepseekv3", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", *NEMOTRON)
"""Without marks: they write earlier turns otherwise, or an answer otherwise than behind the generation prompt."""
LAST_IS_CLEAR = ("qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6")
NO_END = ("glm4moe",)
"""Without marks: the token that ends a turn is written by the next one."""
GIVEN = {"qwen3_8": "<think>\n"}
"""What the generation prompt gives, and marks count as generated."""

PLAIN = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "second"},
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "2"},
    {"role": "assistant", "content": "it is 2"},
]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "x"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}]


def tokenizer_with(template: str, eos_token: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the special tokens of all families."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(ENDS))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, bos_token="<s>", eos_token=eos_token
    )


def published(name: str) -> PreTrainedTokenizerFast:
    eos = next((token for family, token in FAMILIES_ENDS.items() if name.startswith(family)), "<|im_end|>")
    return tokenizer_with((FOLDER / f"{name}.jinja").read_text(), eos)


def learned(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], tools: Any = None, chosen: Any = None
) -> list[str]:
    """The learned texts, without white space around them, which marks treat in several ways."""
    text, spans = ChatTemplate(tokenizer, {"date_string": "26 Jul 2024"}).render(messages, tools, chosen)
    return [part for part in (text[start:end].strip() for start, end in spans) if part]


@pytest.mark.parametrize("name", [name for name in FOR_TEXT if name not in REFUSED])
@pytest.mark.parametrize(("messages", "tools"), [(PLAIN, None), (CALLED, TOOLS)], ids=["plain", "tools"])
def test_what_a_published_template_shows_is_what_marks_by_hand_say(
    name: str, messages: list[dict[str, Any]], tools: Any
) -> None:
    marked = published(f"{name}_training")
    if tools and name.startswith(("cohere", "gemma")):
        with refuses("", "alternate"):
            learned(published(name), messages, tools)
        return
    expected = "".join(learned(marked, messages, tools)).replace(GIVEN.get(name, "\0"), "")
    found = "".join("".join(learned(published(name), messages, tools)).split())
    if name in NO_END:
        expected = expected.replace("<|user|>", "").replace("<|observation|>", "")
    assert found == "".join(expected.split())
    answers = ("it is 2",) if tools else ("first", "second")
    assert all("".join(answer.split()) in found for answer in answers)
    assert "?" not in found


@pytest.mark.parametrize("name", [name for name in FOR_TEXT if name in REFUSED])
def test_a_published_template_that_does_not_show_the_answers_is_refused(name: str) -> None:
    with pytest.raises(UnclearTurns, match=r"generation.*chat_template"):
        learned(published(name), PLAIN)
    last = [False, False, False, True]
    if name in LAST_IS_CLEAR:
        (answer,) = learned(published(name), PLAIN, chosen=last)
        assert answer.endswith("second<|im_end|>")
        assert "".join(learned(published(f"{name}_training"), PLAIN, chosen=last)).endswith(answer)
    else:
        with pytest.raises(UnclearTurns):
            learned(published(name), PLAIN, chosen=last)


@pytest.mark.parametrize("name", FOR_TEXT)
@pytest.mark.parametrize(("messages", "tools"), [(PLAIN, None), (CALLED, TOOLS)], ids=["plain", "tools"])
def test_the_mask_of_marks_is_the_one_of_transformers(name: str, messages: list[dict[str, Any]], tools: Any) -> None:
    if tools and name.startswith(("cohere", "gemma")):
        pytest.skip("it has no tools")
    tokenizer = published(f"{name}_training")
    expected = tokenizer.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True, date_string="26 Jul 2024"
    )
    text, spans = ChatTemplate(tokenizer, {"date_string": "26 Jul 2024"}).render(messages, tools)
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    assert encoding.ids == expected["input_ids"]
    assert learned_tokens(encoding.offsets, spans).tolist() == np.array(expected["assistant_masks"], bool).tolist()


@pytest.mark.parametrize("name", FOR_TEXT)
def test_marks_are_divided_among_the_answers(name: str) -> None:
    tokenizer = published(f"{name}_training")
    one, two = (learned(tokenizer, PLAIN, chosen=[False, first, False, not first]) for first in (True, False))
    assert [*one, *two] == learned(tokenizer, PLAIN)
    assert "first" in "".join(one)
    assert "second" in "".join(two)


@pytest.mark.skipif(not FOR_TEXT, reason="TRL is not installed")
def test_there_are_enough_families() -> None:
    assert len(FOR_TEXT) >= 20


# --- formats of families that TRL has no template for -----------------------------------------------------------------

ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
    "{{ '[INST] ' + message.content + '[/INST]' }}{% else %}{{ ' ' + message.content + eos_token }}{% endif %}"
    "{% endfor %}"
)
ENDED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|assistant|>\n' }}"
    "{% generation %}{{ message.content + '<|end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|user|>\n' + message.content + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
    "{% else %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}"
)
"""As Phi-3's: another token behind the last turn."""
UNMARKED_END = ENDED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.mark.parametrize(
    ("template", "eos_token", "expected"),
    [
        (ZEPHYR, "</s>", ["first</s>", "second</s>"]),
        (MISTRAL, "</s>", ["first</s>", "second</s>"]),
        (UNMARKED_END, "<|endoftext|>", ["first<|end|>", "second<|end|>\n<|endoftext|>"]),
        (ENDED, "<|endoftext|>", ["first<|end|>", "second<|end|>", "<|endoftext|>"]),
    ],
    ids=["zephyr", "mistral", "ended", "ended and marked"],
)
def test_other_formats(template: str, eos_token: str, expected: list[str]) -> None:
    tokenizer = tokenizer_with(template, eos_token)
    assert learned(tokenizer, PLAIN) == expected
    assert learned(tokenizer, PLAIN, chosen=[False, True, False, False]) == expected[:1]
    assert learned(tokenizer, PLAIN, chosen=[False, False, False, True]) == expected[1:]


def test_a_turn_that_ends_otherwise_as_the_last_one_is_not_taken_for_shown() -> None:
    """As gpt-oss's: `<|end|>` in the middle, another token behind the last turn."""
    template = ZEPHYR.replace("eos_token", "('<|endoftext|>' if loop.last else '<|end|>')")
    with pytest.raises(UnclearTurns):
        learned(tokenizer_with(template), PLAIN)
