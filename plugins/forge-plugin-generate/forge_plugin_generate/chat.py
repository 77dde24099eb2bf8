"""A chat in the terminal: `forge-run generate RUN --chat`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from forge_plugin_generate.prompts import chat_ids

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer

Message = dict[str, str]
Answer = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[int]]]
"""Continues prompts: ids of each -> ids of each answer."""
MARK = "> "
"""Stands before what is typed, on a terminal."""


def answer_once(tokenizer: Tokenizer, answer: Answer, system: str, questions: Sequence[str]) -> list[str]:
    """Returns the answer to each question, each in a conversation of its own; raises `JobError` as `chat_ids`."""
    prompts = [chat_ids(tokenizer, [*_begun(system), _message("user", text)]) for text in questions]
    return [tokenizer.decode(row) for row in answer(prompts)]


def talk(tokenizer: Tokenizer, answer: Answer, system: str) -> None:
    """Answer each line of standard input in one conversation, until it ends; raises `JobError` as `chat_ids`."""
    messages = _begun(system)
    for line in _lines():
        messages.append(_message("user", line))
        # The whole conversation is read again for each answer: a template may write earlier turns in another way now.
        [row] = answer([chat_ids(tokenizer, messages)])
        text = tokenizer.decode(row)
        messages.append(_message("assistant", text))
        print(text, flush=True)


def _begun(system: str) -> list[Message]:
    return [_message("system", system)] if system else []


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _lines() -> Iterator[str]:
    """Yields the lines of standard input that are not blank, without their ends."""
    mark = MARK if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(mark)
        except EOFError:
            return
        if line.strip():
            yield line
