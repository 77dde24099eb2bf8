"""What a tokenizer needs for tasks that are asked as chats. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class WritesChats(Protocol):
    """A tokenizer that writes conversations as text, as `auto` of forge-plugin-huggingface does."""

    @property
    def chat_template(self) -> str:
        """The template, for the record; empty if there is none."""
        ...

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, goes_on: bool = False) -> str:
        """Returns the text of a conversation up to where the next answer begins; raises `JobError` if it cannot.

        Args:
            messages: `role` and `content` of each.
            goes_on: whether the answer continues the last message instead.
        """
        ...

    def encode_special(self, text: str) -> list[int]:
        """Encode a text whose special tokens, spelt out, are special tokens."""
        ...
