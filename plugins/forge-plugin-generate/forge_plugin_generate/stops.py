"""Where an answer ends: at tokens, and at texts whatever tokens they have. Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_plugin_generate.prompts import KnowsTokens, stop_ids

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer

SLACK = 8
"""Tokens that may have no text, or a part of a character, among those that spell a stop."""


@frozen
class Stops:
    """The ends of answers of one tokenizer."""

    tokenizer: Tokenizer
    ids: Sequence[int]
    """Ids at which an answer ends, the end-of-text among them; they do not belong to it."""
    texts: Sequence[str] = ()
    """Texts before which an answer ends. The model has written them, in tokens that may hold more than they do."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, further: Sequence[str] = ()) -> Stops:
        """Returns the tokenizer's own ends and `further` ones: names of tokens, and texts.

        Raises:
            JobError: one of `further` is empty.
        """
        if "" in further:
            raise JobError("a stop is an empty text, before which every answer ends; name a token or a text")
        ids, texts = set(stop_ids(tokenizer)), []
        for stop in further:
            single = _single(tokenizer, stop)
            if single is not None:
                ids.add(single)
            # The same text may also be a part of a longer token, unless the token is special, which decodes to nothing
            if single is None or tokenizer.decode([single]) == stop:
                texts.append(stop)
        return cls(tokenizer, sorted(ids), tuple(texts))

    def reached(self, ids: Sequence[int]) -> bool:
        """Whether one of the texts is in the text of these ids, the newest of which is new; `until` of `generate`."""
        if not self.texts:
            return False
        # The end first, so that a token costs the same however long the text is
        tail = self.tokenizer.decode(ids[-self._longest() :])
        return any(stop in tail for stop in self.texts) and self.decode(ids) != self.tokenizer.decode(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of these ids, before the first of the texts that end it."""
        return self.before(self.tokenizer.decode(ids))

    def before(self, text: str) -> str:
        """Returns the part of a text before the first of the texts that end it; all of it if there is none."""
        places = [place for stop in self.texts if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text

    def certain(self, text: str) -> str:
        """Returns the part of an unfinished text that no stop can take back, as one may have begun at its end."""
        begun = [
            length
            for stop in self.texts
            for length in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:length])
        ]
        return text[: len(text) - max(begun, default=0)]

    def _longest(self) -> int:
        # A token has a byte at least, but for those without text
        return max(len(stop.encode()) for stop in self.texts) + SLACK


def _single(tokenizer: Tokenizer, stop: str) -> int | None:
    """Returns the id of a token by its name, or of a text of one token; None if it has several."""
    # By name first: `encode` may divide the name of a special token as ordinary text
    id_ = tokenizer.token_id(stop) if isinstance(tokenizer, KnowsTokens) else None
    if id_ is not None:
        return id_
    ids = tokenizer.encode(stop)
    return ids[0] if len(ids) == 1 else None
