"""From texts and chats to the ids of prompts, and the ids at which an answer of a tokenizer ends. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def stop_ids(tokenizer: Tokenizer) -> list[int]:
    """Returns the ids at which generation stops: the end-of-text, and the tokenizer's others."""
    own = tokenizer.stop_ids() if isinstance(tokenizer, KnowsStops) else ()
    return sorted({tokenizer.end_of_text, *own})


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
