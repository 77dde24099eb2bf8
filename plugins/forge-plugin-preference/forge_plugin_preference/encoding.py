"""Tokenises preferences: documents of a prompt and an answer, of which the answer alone is learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from attrs import frozen

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.contracts.errors import JobError, Problem
from forge_core.launch.progress_beacon import report_progress
from forge_kit.data.tokenizers import begin_of_text

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_plugin_preference.lines import Preference

AT_A_TIME = 512
"""Lines that are tokenised together, for tokenizers that use several threads."""


@runtime_checkable
class EncodesChats(Protocol):
    """A tokenizer with a chat template, as `auto` of forge-plugin-huggingface builds it."""

    def check_chat(self) -> None:
        """Raise `JobError` if it cannot encode chats."""

    def chat(self, messages: Any, tools: Any = None) -> Any:
        """Returns `ids` (n,) of a conversation and `learned` (n,), whether a token is the assistant's."""
        ...

    def chat_prompt(self, messages: Any, tools: Any = None) -> list[int]:
        """Returns ids of a conversation up to where the assistant's next answer begins."""
        ...


@frozen(eq=False)
class Document:
    """A prompt with an answer, n tokens."""

    ids: np.ndarray
    """(n,) int32."""
    learned: np.ndarray
    """(n,) bool: the tokens of the answer."""
    prompt: int
    """Tokens before the answer."""

    def without(self, start: int, stop: int) -> Document:
        """Returns the document without the tokens [start, stop) of its prompt."""
        ids, learned = (np.delete(values, slice(start, stop)) for values in (self.ids, self.learned))
        return Document(ids, learned, self.prompt - (stop - start))

    def entries(self) -> tuple[np.ndarray, np.ndarray]:
        """(n,) each: inputs, and labels, the learned ones of the next tokens."""
        labels = np.where(self.learned, self.ids, IGNORED_LABEL)
        return self.ids, np.append(labels[1:], IGNORED_LABEL)


def answering(question: Document, answer: Document) -> Document:
    """The prompt of one document with the answer of another."""
    first, second = question.prompt, answer.prompt
    ids = np.concatenate([question.ids[:first], answer.ids[second:]])
    return Document(ids, np.concatenate([question.learned[:first], answer.learned[second:]]), first)


def encode(preferences: Sequence[Preference], tokenizer: Tokenizer, path: str) -> list[tuple[Document, ...]]:
    """Tokenise each line: a document for each of its answers.

    Raises:
        JobError: the tokenizer has no chat template, or it does not show where an answer begins; lines are named.
    """
    if any(each.is_chat for each in preferences):
        if not isinstance(tokenizer, EncodesChats):
            message = f"{path} has chat messages, which need a chat template"
            raise JobError([Problem("path", f'{message}; set [data.tokenizer] type = "auto"')])
        tokenizer.check_chat()
    encoded: list[tuple[Document, ...]] = []
    for start in range(0, len(preferences), AT_A_TIME):
        encoded += _encode_some(preferences[start : start + AT_A_TIME], tokenizer, path)
        report_progress()  # the watchdogs of other ranks are waiting
    return encoded


def _encode_some(lines: Sequence[Preference], tokenizer: Any, path: str) -> Iterator[tuple[Document, ...]]:
    texts = [text for line in lines if not line.is_chat for text in (line.prompt, *line.answers)]
    ids = iter(tokenizer.encode_batch(texts) if texts else ())
    begin, end = begin_of_text(tokenizer), tokenizer.end_of_text
    for line in lines:
        if line.is_chat:
            yield _chat(line, tokenizer, path)
            continue
        # A first token needs one before it to be predicted from: the end of the document before, as in pretraining
        prompt = [*begin, *next(ids)] or [end]
        yield tuple(_document(prompt, [*next(ids), end]) for _ in line.answers)


def _document(prompt: Sequence[int], answer: Sequence[int]) -> Document:
    learned = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return Document(np.array([*prompt, *answer], np.int32), learned, len(prompt))


def _chat(line: Preference, tokenizer: EncodesChats, path: str) -> tuple[Document, ...]:
    try:
        prompt = tokenizer.chat_prompt(list(line.prompt))
        chats = [tokenizer.chat([*line.prompt, *answer]) for answer in line.answers]
    except JobError as error:
        raise JobError([Problem("path", f"{path}, line {line.number}: {error}")]) from error
    documents = []
    for chat in chats:
        ids = np.asarray(chat.ids)
        if ids[: len(prompt)].tolist() != list(prompt):
            message = "the chat template writes the prompt otherwise than the beginning of the whole conversation"
            raise JobError([Problem("path", f"{path}, line {line.number}: {message}; give a template that does not")])
        # Earlier turns of the assistant belong to the prompt
        learned = np.asarray(chat.learned, bool) & (np.arange(len(ids)) >= len(prompt))
        if not learned.any():
            message = "an answer has no turn of the assistant"
            raise JobError([Problem("path", f"{path}, line {line.number}: {message}; nothing would be learned of it")])
        documents.append(Document(ids.astype(np.int32), learned, len(prompt)))
    return tuple(documents)
