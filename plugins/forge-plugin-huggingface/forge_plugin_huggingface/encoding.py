"""Encodes rows of a dataset as token ids: a field of text, or a field of chat messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from forge_core.contracts.errors import JobError
from forge_kit.data.tokenizers import begin_of_text
from forge_plugin_huggingface.chat import ChatTokenizer, Tools
from forge_plugin_huggingface.rows import SourceRow

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer


class Encoded(NamedTuple):
    """A document of n tokens, without end-of-text."""

    ids: np.ndarray
    """(n,) int64."""
    learned: np.ndarray | None
    """(n,) bool: true for ids that are learned as labels; None: all."""
    text_bytes: int
    """UTF-8 bytes of the encoded text; 0 if the ids do not represent one text."""


class Encoder(Protocol):
    """Turns rows into documents."""

    columns: tuple[str, ...]
    """Fields of a row that it reads."""
    has_mask: bool
    """Whether documents have `learned`."""

    def key(self) -> Sequence[Any]:
        """Returns plain JSON that differs whenever an encoding could differ."""
        ...

    def encode(self, rows: Sequence[SourceRow]) -> list[Encoded | None]:
        """Returns the document of each row; None if there is nothing to learn from it.

        Raises:
            JobError: a row has another content; the message names the row.
        """
        ...


class TextEncoder:
    """Rows that hold a text. Empty ones are left out."""

    has_mask = False

    def __init__(self, tokenizer: Tokenizer, field: str) -> None:
        self._tokenizer, self._field, self._begin = tokenizer, field, begin_of_text(tokenizer)
        self.columns: tuple[str, ...] = (field,)

    def key(self) -> Sequence[Any]:
        """Includes the tokenizer's fingerprint, its special ids and the name of the field."""
        return ["text", self._field, *_key_of(self._tokenizer)]

    def encode(self, rows: Sequence[SourceRow]) -> list[Encoded | None]:
        """Encodes all texts in one batch, which fast tokenizers do in several threads."""
        texts = [text_of(row, self._field) for row in rows]
        encoded = iter(self._tokenizer.encode_batch([text for text in texts if text]))
        return [_encoded(text, [*self._begin, *next(encoded)]) if text else None for text in texts]


class ChatEncoder:
    """Rows that hold the messages of a conversation. Rows without an answer of the assistant are left out."""

    has_mask = True

    def __init__(self, tokenizer: Tokenizer, messages: str, tools: str) -> None:
        """Read chats from the fields `messages` and `tools` of a row; the latter may be empty.

        Raises:
            JobError: the tokenizer has no chat template.
        """
        if not isinstance(tokenizer, ChatTokenizer):
            raise JobError('messages need a tokenizer with a chat template; set [data.tokenizer] type = "auto"')
        tokenizer.check_chat()
        self._tokenizer, self._messages, self._tools = tokenizer, messages, tools
        self._end_of_text = tokenizer.end_of_text
        self.columns: tuple[str, ...] = (messages, tools) if tools else (messages,)

    def key(self) -> Sequence[Any]:
        """Includes the tokenizer's fingerprint, which its template and variables are part of."""
        return ["chat", self._messages, self._tools, *_key_of(self._tokenizer)]

    def encode(self, rows: Sequence[SourceRow]) -> list[Encoded | None]:
        """Encodes one by one: each conversation is rendered by the template first."""
        return [self._encode(row) for row in rows]

    def _encode(self, row: SourceRow) -> Encoded | None:
        try:
            messages = checked_messages(row.values[self._messages], self._messages)
            tools = checked_tools(row.values[self._tools], self._tools) if self._tools else None
            chat = self._tokenizer.chat(messages, tools) if messages else None
        except JobError as error:
            raise JobError(f"{row.place}: {error}") from error
        if chat is None or not chat.learned.any():
            return None
        # A template that ends with the end-of-text has ended the document already.
        stop = -1 if chat.ids[-1] == self._end_of_text else None
        return Encoded(chat.ids[:stop], chat.learned[:stop], 0)


def text_of(row: SourceRow, field: str) -> str:
    """Returns the text of a row; raises `JobError` if the field holds something else."""
    value = row.values[field]
    if value is None or isinstance(value, str):
        return value or ""
    message = f"{field!r} holds {type(value).__name__} {str(value)[:60]!r}, which is not text"
    raise JobError(f"{row.place}: {message}; set `field` to a field of text, or `messages` to one of chat messages")


def checked_messages(value: Any, field: str) -> list[dict[str, Any]]:
    """Returns the messages of a conversation, without keys that Arrow added because other rows have them.

    Raises:
        JobError: the value is not a list of messages.
    """
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise JobError(f"{field!r} holds {type(value).__name__} {str(value)[:60]!r}, not a list of messages")
    messages = [without_none(message) for message in value]
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or not message.keys() - {"role"}:
            keys = ", ".join(map(repr, message)) or "nothing"
            raise JobError(f"message {number} of {field!r} has {keys}; a message has 'role' and 'content'")
    return messages


def checked_tools(value: Any, field: str) -> Tools:
    """Returns JSON schemas of tools, which may be JSON text; None if there are none.

    Raises:
        JobError: the value is not a list of JSON schemas.
    """
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise JobError(f"{field!r} is not JSON ({error})") from error
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise JobError(f"{field!r} holds {type(tools).__name__} {str(tools)[:60]!r}, not a list of JSON schemas")
    return [without_none(tool) for tool in tools]


def without_none(value: Any) -> Any:
    """Drop None entries recursively: Arrow adds them for keys that other rows have."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def _encoded(text: str, ids: Sequence[int]) -> Encoded:
    return Encoded(np.array(ids, np.int64), None, len(text.encode()))


def _key_of(tokenizer: Tokenizer) -> Sequence[Any]:
    # The size, too: it decides whether ids are stored in two bytes or four
    return [tokenizer.fingerprint(), tokenizer.vocab_size, tokenizer.end_of_text, *begin_of_text(tokenizer)]
