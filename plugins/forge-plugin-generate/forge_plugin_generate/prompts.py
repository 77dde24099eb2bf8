"""From texts and chats to the ids of prompts, and the ids at which an answer ends. Without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from forge_core.contracts.errors import JobError
from forge_kit.data.tokenizers import begin_of_text

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer

Messages = Sequence[Mapping[str, Any]]
"""A conversation: `role` (`system`, `user`, `assistant`) and `content` of each message."""


@runtime_checkable
class KnowsTokens(Protocol):
    """A tokenizer whose tokens have names, special ones included, which text cannot spell."""

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token, such as `<|im_end|>`; None if there is none of that name."""
        ...


@runtime_checkable
class KnowsStops(Protocol):
    """A tokenizer with several ids at which generation stops, such as the end of a turn."""

    def stop_ids(self) -> Sequence[int]:
        """Returns these ids."""
        ...


@runtime_checkable
class PromptsChats(Protocol):
    """A tokenizer that writes conversations for an answer."""

    def check_chat(self) -> None:
        """Raise `JobError` if it cannot, as without a chat template."""

    def chat_prompt(self, messages: Messages) -> list[int]:
        """Returns the ids of a conversation, to where the answer begins; raises `JobError` if it cannot be written."""
        ...


def prompt_ids(tokenizer: Tokenizer, text: str, *, bos: bool = True) -> list[int]:
    """Returns the ids of a prompt; if it has none, the end-of-text id, as if a text came before it.

    Args:
        tokenizer: the tokenizer of the model.
        text: the prompt; an empty one starts a new document.
        bos: whether it begins with the tokenizer's beginning of text, as documents do in training.
    """
    begin = begin_of_text(tokenizer) if bos else []
    return [*begin, *tokenizer.encode(text)] or [tokenizer.end_of_text]


def stop_ids(tokenizer: Tokenizer, further: Iterable[str] = ()) -> list[int]:
    """Returns the ids at which generation stops: the end-of-text, the tokenizer's others, and `further` tokens.

    Raises:
        JobError: one of `further` is not a single token.
    """
    own = tokenizer.stop_ids() if isinstance(tokenizer, KnowsStops) else ()
    return sorted({tokenizer.end_of_text, *own, *(_single(tokenizer, token) for token in further)})


def chat_ids(tokenizer: Tokenizer, messages: Messages) -> list[int]:
    """Returns the ids of a conversation, to where the assistant's next answer begins.

    Raises:
        JobError: the tokenizer has no chat template, or its template refuses the conversation.
    """
    if not isinstance(tokenizer, PromptsChats):
        raise JobError(
            "this tokenizer writes no chats; train with one that does, such as [data.tokenizer] of type "
            '"auto" with a chat_template'
        )
    tokenizer.check_chat()
    return tokenizer.chat_prompt(messages)


def _single(tokenizer: Tokenizer, token: str) -> int:
    # By name first: `encode` may divide the name of a special token as ordinary text
    id_ = tokenizer.token_id(token) if isinstance(tokenizer, KnowsTokens) else None
    ids = tokenizer.encode(token) if id_ is None else [id_]
    if len(ids) != 1:
        message = f"{token!r} is {len(ids)} tokens of this tokenizer; generation can stop at a single token only"
        raise JobError(f"{message}: name a special one, or a shorter text")
    return ids[0]
