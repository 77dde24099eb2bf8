"""Reads and checks the lines of a file of preferences, before anything is tokenised."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from forge_core.contracts.errors import JobError, Problem

SHOWN = 20
"""Malformed lines that one error names."""
PAIR, SINGLE = ("chosen", "rejected"), ("completion",)
FORMS = '"prompt", "chosen" and "rejected", or "prompt", "completion" and "label"'
Text = str | tuple[Mapping[str, Any], ...]
"""A text, or messages of a chat."""


class Malformed(Exception):
    """The fault of a line."""


@frozen
class Preference:
    """A line: a prompt with two answers, the first of which is preferred, or with one answer and a label."""

    number: int
    """Of the line, from 1."""
    prompt: Text
    answers: tuple[Text, ...]
    desirable: tuple[bool, ...]
    """Of each answer."""
    reference: tuple[float, ...] = ()
    """Log-probability of each answer under the reference, in nats; empty if they are not needed."""
    margin: float | None = None
    """By how much the first answer is better; None if that is not needed."""

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)

    def texts(self) -> Iterator[str]:
        """Yields its texts, for a tokenizer to be trained on."""
        for part in (self.prompt, *self.answers):
            if isinstance(part, str):
                yield part
            else:
                yield from (message["content"] for message in part if isinstance(message.get("content"), str))


def read_preferences(path: str, *, with_reference: bool = False, with_margin: bool = False) -> list[Preference]:
    """Read all lines of a file; empty ones are left out.

    Args:
        path: of a JSONL file.
        with_reference: whether each line must have log-probabilities under the reference.
        with_margin: whether each line must have a number `margin`.

    Raises:
        JobError: the file cannot be read, or lines are malformed: each is named, with what is wrong.
    """
    preferences, problems = [], []
    for number, text in numbered_lines(path):
        try:
            preferences.append(parse(text, number, with_reference=with_reference, with_margin=with_margin))
        except Malformed as error:
            problems.append(f"{path}, line {number}: {error}")
    # Reversed, so that the line kept for each form is its first one
    forms = {len(each.answers): each for each in reversed(preferences)}
    if len(forms) > 1:
        lines = " and ".join(f"line {forms[size].number} has {size}" for size in sorted(forms))
        problems.append(f"{path}: all lines must have two answers, or all one; {lines}; split the file")
    if problems:
        more = [f"… and {len(problems) - SHOWN} more malformed lines of {path}"] if len(problems) > SHOWN else []
        raise JobError([Problem("path", problem) for problem in (*problems[:SHOWN], *more)])
    return preferences


def numbered_lines(path: str) -> Iterator[tuple[int, str]]:
    """Yields the lines of a file that are not empty, with their numbers from 1; raises `JobError` if it cannot."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise JobError([Problem("path", f"{path} cannot be read: {error}")]) from error


def parse(text: str, number: int, *, with_reference: bool = False, with_margin: bool = False) -> Preference:
    """Read a line.

    Raises:
        Malformed: it is no preference.
    """
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise Malformed(f"is not JSON ({error})") from None
    if not isinstance(entries, dict):
        raise Malformed(f"holds {type(entries).__name__} {text.strip()[:40]!r}, not an object with {FORMS}")
    keys = _keys_of(entries)
    answers = tuple(_text(entries[key], key) for key in keys)
    prompt, answers = _prompt_and_answers(entries, answers, keys)
    desirable = (True, False) if keys == PAIR else (_label(entries),)
    reference = _reference(entries, keys) if with_reference else ()
    return Preference(number, prompt, answers, desirable, reference, _margin(entries) if with_margin else None)


def _keys_of(entries: Mapping[str, Any]) -> Sequence[str]:
    pair, single = (all(entries.get(key) is not None for key in keys) for keys in (PAIR, (*SINGLE, "label")))
    if pair == single:
        names = ", ".join(map(repr, entries)) or "no key"
        raise Malformed(f"has {names}; a line has {FORMS}{', not both' if pair else ''}")
    return PAIR if pair else SINGLE


def _text(value: Any, key: str) -> Text:
    if isinstance(value, str):
        if not value:
            raise Malformed(f"{key!r} is empty")
        return value
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        # Writers of tables add keys that other messages have, with null
        messages = tuple({name: each for name, each in message.items() if each is not None} for message in value)
        for place, message in enumerate(messages):
            if not isinstance(message.get("role"), str) or not message.keys() - {"role"}:
                names = ", ".join(map(repr, message)) or "nothing"
                raise Malformed(f"message {place} of {key!r} has {names}; a message has 'role' and 'content'")
        return messages
    raise Malformed(f"{key!r} is {json.dumps(value)[:60]}; it is a text or a list of chat messages")


def _prompt_and_answers(
    entries: Mapping[str, Any], answers: tuple[Text, ...], keys: Sequence[str]
) -> tuple[Text, tuple[Text, ...]]:
    value = entries.get("prompt")
    if value is None:
        return _shared_messages(answers)
    prompt = value if value == "" else _text(value, "prompt")
    if isinstance(prompt, str):
        if chats := [key for key, answer in zip(keys, answers, strict=True) if not isinstance(answer, str)]:
            raise Malformed(f"{chats[0]!r} has messages, and the prompt is a text; make both texts, or both messages")
        return prompt, answers
    # A text that answers messages is the assistant's
    return prompt, tuple(({"role": "assistant", "content": a},) if isinstance(a, str) else a for a in answers)


def _shared_messages(answers: tuple[Text, ...]) -> tuple[Text, tuple[Text, ...]]:
    """Without a prompt, each answer is a whole conversation: the prompt is what they begin with alike."""
    chats = [answer for answer in answers if not isinstance(answer, str)]
    if len(chats) < 2:
        raise Malformed("has no 'prompt'; only 'chosen' and 'rejected' that are whole conversations do without one")
    length = 0
    # At least one message stays as the answer, even of two conversations that are equal
    while all(len(chat) > length + 1 for chat in chats) and chats[0][length] == chats[1][length]:
        length += 1
    if not length:
        raise Malformed("has no 'prompt', and the conversations 'chosen' and 'rejected' do not begin alike")
    return chats[0][:length], tuple(chat[length:] for chat in chats)


def _label(entries: Mapping[str, Any]) -> bool:
    label = entries["label"]
    # 1 and 0 are equal to true and false, and accepted
    if label not in (True, False):
        raise Malformed(f"'label' is {json.dumps(label)[:60]}; it is true for a desirable answer, or false")
    return bool(label)


def _reference(entries: Mapping[str, Any], keys: Sequence[str]) -> tuple[float, ...]:
    names = [f"reference_{key}" for key in keys]
    for name in names:
        value = entries.get(name)
        # In Python, bool is a subclass of int
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value > 0:
            seen = f"is {json.dumps(value)[:60]}" if name in entries else "is missing"
            message = f"{name!r} {seen}; without loss.reference it is the log-probability of that answer, in nats"
            raise Malformed(f"{message}, at most 0")
    return tuple(float(entries[name]) for name in names)


def _margin(entries: Mapping[str, Any]) -> float:
    value = entries.get("margin")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        seen = f"is {json.dumps(value)[:60]}" if "margin" in entries else "is missing"
        raise Malformed(f"'margin' {seen}; with loss.margins it is a number, by how much 'chosen' is better")
    return float(value)


def texts_of(preferences: Iterable[Preference]) -> Iterator[str]:
    """Yields all texts, for a tokenizer to be trained on."""
    for preference in preferences:
        yield from preference.texts()
