"""Optional abilities of tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from forge_core.contracts.data import Tokenizer


@runtime_checkable
class BeginsText(Protocol):
    """A tokenizer whose models expect certain ids, such as the id of `<s>`, before every document and prompt."""

    begin_of_text: Sequence[int]


def begin_of_text(tokenizer: Tokenizer) -> list[int]:
    """Ids to put before every document and prompt, see `BeginsText`; most tokenizers have none."""
    return list(tokenizer.begin_of_text) if isinstance(tokenizer, BeginsText) else []
