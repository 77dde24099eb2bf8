"""Encodes rows of a dataset as token ids: a text, chat messages, or a prompt and its completion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from forge_core.contracts.errors import JobError
from forge_kit.data.tokenizers import begin_of_text
from forge_plugin_huggingface.chat import ChatTokenizer, Tools, UnclearTurns
from forge_plugin_huggingface.conversation import (
    Conversation,
    Learn,
    checked_tools,
    join_conversations,
    read_conversation,
)
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
    is_cut: bool = False
    """Whether it is the beginning of a longer document: what follows it is then not learned as its end."""

    def learned_with_end(self) -> np.ndarray | None:
        """(n + 1,) bool: `learned`, and whether the end-of-text is: if the token before it is, and nothing is cut."""
        if self.learned is None:
            return None
        return np.append(self.learned, self.learned[-1:].any() and not self.is_cut)


class LeftOut(Enum):
    """Why a row has no document."""

    EMPTY = "without anything to learn"
    TOO_LONG = "longer than train.seq_len"


class Encoder(Protocol):
    """Turns rows into documents."""

    columns: tuple[str, ...]
    """Fields of a row that it reads."""
    has_mask: bool
    """Whether documents have `learned`."""
    learns: str
    """What rows must have, for errors: `text`."""

    def key(self) -> Sequence[Any]:
        """Returns plain JSON that differs whenever an encoding could differ."""
        ...

    def encode(self, rows: Sequence[SourceRow]) -> list[Encoded | LeftOut]:
        """Returns the document of each row, or why it has none.

        Raises:
            JobError: a row has another content; the message names the row.
        """
        ...


class TextEncoder:
    """Rows that hold a text. Empty ones are left out."""

    has_mask = False
    learns = "text"

    def __init__(self, tokenizer: Tokenizer, field: str) -> None:
        self._tokenizer, self._field, self._begin = tokenizer, field, begin_of_text(tokenizer)
        self.columns: tuple[str, ...] = (field,)

    def key(self) -> Sequence[Any]:
        """Includes the tokenizer's fingerprint, its special ids and the name of the field."""
        return ["text", self._field, *_key_of(self._tokenizer)]

    def encode(self, rows: Sequence[SourceRow]) -> list[Encoded | LeftOut]:
        """Encodes all texts in one batch, which fast tokenizers do in several threads."""
        texts = [text_of(row, self._field) for row in rows]
        encoded = iter(self._tokenizer.encode_batch([text for text in texts if text]))
        return [_encoded(text, [*self._begin, *next(encoded)]) if text else LeftOut.EMPTY for text in texts]


class ChatEncoder:
    """Rows that hold the messages of a conversation. Rows without an answer of the assistant are left out."""

    has_mask = True
    learns = "an answer of the assistant that is learned"

    def __init__(self, tokenizer: Tokenizer, messages: str, tools: str, learn: Learn = "all") -> None:
        """Read chats from the fields `messages` and `tools` of a row; the latter may be empty.

        Raises:
            JobError: the tokenizer has no chat template.
        """
        self._tokenizer, self._end_of_text = _chat_tokenizer(tokenizer, "messages need"), tokenizer.end_of_text
        self._messages, self._tools, self._learn = messages, tools, learn
        self._tokenizer_key = _key_of(tokenizer)
        self.columns: tuple[str, ...] = (messages, tools) if tools else (messages,)

    def key(self) -> Sequence[Any]:
        """Includes the tokenizer's fingerprint, which its template and variables are part of."""
        # Nothing for the default, so that tokens that were cached by earlier versions stay valid
        learn = [self._learn] if self._learn != "all" else []
        return ["chat", self._messages, self._tools, *self._tokenizer_key, *learn]

    def encode(self, rows: Sequence[SourceRow]) -> list[Encoded | LeftOut]:
        """Encodes one by one: each conversation is rendered by the template first."""
        return [self._encode(row) for row in rows]

    def _encode(self, row: SourceRow) -> Encoded | LeftOut:
        with _placed(row, self._learn):
            conversation = read_conversation(row.values[self._messages], self._messages, self._learn)
            return _chat(self._tokenizer, self._end_of_text, conversation, _tools(row, self._tools))


class CompletionEncoder:
    """Rows that hold a prompt and its completion, of which only the completion is learned.

    Both are texts, or both are lists of chat messages. Rows without a completion are left out.
    """

    has_mask = True
    learns = "a completion"

    def __init__(
        self, tokenizer: Tokenizer, prompt: str, completion: str, tools: str = "", learn: Learn = "all"
    ) -> None:
        """Read these fields of a row; `tools` may be empty, and is for chats, as is `learn`."""
        self._tokenizer, self._fields, self._tools, self._learn = tokenizer, (prompt, completion), tools, learn
        self._begin = begin_of_text(tokenizer)
        self.columns: tuple[str, ...] = (prompt, completion, tools) if tools else (prompt, completion)

    def key(self) -> Sequence[Any]:
        """Includes the tokenizer's fingerprint, which its template and variables are part of."""
        return ["completion", *self._fields, self._tools, self._learn, *_key_of(self._tokenizer)]

    def encode(self, rows: Sequence[SourceRow]) -> list[Encoded | LeftOut]:
        """Encodes the texts in one batch, and chats one by one."""
        pairs = [self._pair(row) for row in rows]
        texts = [pair for pair in pairs if isinstance(pair, TextPair)]
        # As the joined text, too: where it begins with the tokens of the prompt, these are its tokens
        flat = [text for prompt, completion in texts for text in (prompt, completion, prompt + completion)]
        ids = iter(self._tokenizer.encode_batch(flat) if flat else ())
        return [self._text(next(ids), next(ids), next(ids)) if isinstance(pair, TextPair) else pair for pair in pairs]

    def _pair(self, row: SourceRow) -> TextPair | Encoded | LeftOut:
        prompt, completion = (row.values[field] for field in self._fields)
        if not completion:
            return LeftOut.EMPTY
        if isinstance(completion, str) and isinstance(prompt or "", str):
            return TextPair(prompt or "", completion)
        if not isinstance(completion, list) or not isinstance(prompt or [], list):
            kinds = " and ".join(
                f"{field!r} holds {type(value).__name__} {str(value)[:60]!r}"
                for field, value in zip(self._fields, (prompt, completion), strict=True)
            )
            raise JobError(f"{row.place}: {kinds}; both are texts, or both are lists of chat messages")
        with _placed(row, self._learn):
            tokenizer = _chat_tokenizer(self._tokenizer, f"{self._fields[1]!r} holds chat messages, which need")
            conversation = join_conversations(prompt, completion, self._fields, self._learn)
            return _chat(tokenizer, self._tokenizer.end_of_text, conversation, _tools(row, self._tools))

    def _text(self, prompt: Sequence[int], completion: Sequence[int], joined: Sequence[int]) -> Encoded:
        """Returns a document of two texts.

        Its prompt has the tokens that it has at inference, where it is encoded alone, also if the joined text has a
        token that begins in the prompt and ends in the completion. But tokenizers that mark the beginnings of texts,
        as by a space, would put that between the two: then the joined text is taken, and that token is learned.
        """
        apart = [*prompt, *completion]
        if list(joined[: len(prompt)]) != list(prompt) and self._decoded(apart) == self._decoded(joined):
            joined = apart
        # Where the two first differ: a token that reaches into the completion is learned
        given = next((n for n, pair in enumerate(zip(prompt, joined, strict=False)) if pair[0] != pair[1]), len(prompt))
        ids = np.array([*self._begin, *joined], np.int64)
        return Encoded(ids, np.arange(len(ids)) >= len(self._begin) + given, 0)

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


class TextPair(NamedTuple):
    """A prompt and its completion, as texts."""

    prompt: str
    completion: str


class LengthLimit:
    """Documents of another encoder with at most `train.seq_len` tokens, end-of-text aside."""

    def __init__(self, encoder: Encoder, too_long: Literal["drop", "truncate", "error"], most: int) -> None:
        """Drop longer documents, cut them off, or refuse them; `most` tokens are allowed."""
        self._encoder, self._too_long, self._most = encoder, too_long, most
        self.columns, self.learns = encoder.columns, encoder.learns
        # What ends a cut document is not learned, which only a mask can say.
        self.has_mask = encoder.has_mask or too_long == "truncate"

    def key(self) -> Sequence[Any]:
        """Adds the limit to the encoder's key."""
        return [*self._encoder.key(), self._too_long, self._most]

    def encode(self, rows: Sequence[SourceRow]) -> list[Encoded | LeftOut]:
        """Encodes rows as the encoder does, and applies the limit; raises `JobError` for the first row over it."""
        encoded = self._encoder.encode(rows)
        return [
            self._limited(row, document)
            if isinstance(document, Encoded) and len(document.ids) > self._most
            else document
            for row, document in zip(rows, encoded, strict=True)
        ]

    def _limited(self, row: SourceRow, document: Encoded) -> Encoded | LeftOut:
        ids, learned, text_bytes, _ = document
        if self._too_long == "error":
            message = f"its document has {len(ids):,} tokens, more than train.seq_len = {self._most:,}"
            hint = 'raise train.seq_len, or set too_long = "truncate", "drop" or "keep"'
            raise JobError(f"{row.place}: {message}; {hint}")
        mask = np.ones(len(ids), dtype=bool) if learned is None else learned
        if self._too_long == "drop" or not mask[: self._most].any():
            return LeftOut.TOO_LONG
        # The bytes of the part are not known, only their mean share
        return Encoded(ids[: self._most], mask[: self._most], text_bytes * self._most // len(ids), is_cut=True)


def text_of(row: SourceRow, field: str) -> str:
    """Returns the text of a row; raises `JobError` if the field holds something else."""
    value = row.values[field]
    if value is None or isinstance(value, str):
        return value or ""
    message = f"{field!r} holds {type(value).__name__} {str(value)[:60]!r}, which is not text"
    hint = "set `field` to a field of text, `messages` to one of chat messages, or `prompt` and `completion`"
    raise JobError(f"{row.place}: {message}; {hint}")


def _chat(tokenizer: ChatTokenizer, end_of_text: int, conversation: Conversation, tools: Tools) -> Encoded | LeftOut:
    messages, learned = conversation
    if not messages or (learned is not None and not any(learned)):
        return LeftOut.EMPTY
    # Not given where it says nothing: other tokenizers may not have the argument
    chat = tokenizer.chat(messages, tools) if learned is None else tokenizer.chat(messages, tools, learned)
    if not chat.learned.any():
        return LeftOut.EMPTY
    # A template that ends with the end-of-text has ended the document already.
    stop = -1 if chat.ids[-1] == end_of_text else None
    return Encoded(chat.ids[:stop], chat.learned[:stop], 0)


def _tools(row: SourceRow, field: str) -> Tools:
    return checked_tools(row.values[field], field) if field else None


def _chat_tokenizer(tokenizer: Tokenizer, need: str) -> ChatTokenizer:
    if not isinstance(tokenizer, ChatTokenizer):
        raise JobError(f'{need} a tokenizer with a chat template; set [data.tokenizer] type = "auto"')
    tokenizer.check_chat()
    return tokenizer


@contextmanager
def _placed(row: SourceRow, learn: Learn) -> Iterator[None]:
    """Name the row in errors about it."""
    try:
        yield
    except UnclearTurns as error:
        hint = '; or set learn = "last", if the last turn of each chat is enough' if learn == "all" else ""
        raise JobError(f"{row.place}: {error}{hint}") from error
    except JobError as error:
        raise JobError(f"{row.place}: {error}") from error


def _encoded(text: str, ids: Sequence[int]) -> Encoded:
    return Encoded(np.array(ids, np.int64), None, len(text.encode()))


def _key_of(tokenizer: Tokenizer) -> Sequence[Any]:
    # The size, too: it decides whether ids are stored in two bytes or four
    return [tokenizer.fingerprint(), tokenizer.vocab_size, tokenizer.end_of_text, *begin_of_text(tokenizer)]
