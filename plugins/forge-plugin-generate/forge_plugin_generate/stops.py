"""Where an answer ends: at tokens, and at texts whatever tokens they have. Without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
            JobError: one of `further` is empty, or no text of this tokenizer can hold it.
        """
        ids, texts = set(stop_ids(tokenizer)), []
        for stop in further:
            id_ = tokenizer.token_id(stop) if isinstance(tokenizer, KnowsTokens) and stop else None
            if id_ is not None:
                ids.add(id_)
            # The text of an ordinary token may also be a part of another one. A special token has no text
            if id_ is None or tokenizer.decode([id_]):
                _check_text(tokenizer, stop)
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


def _check_text(tokenizer: Tokenizer, stop: str) -> None:
    """Refuse a stop that would never be found; raises a `JobError`."""
    if not stop:
        raise JobError("a stop is an empty text, before which every answer ends; name a token or a text")
    try:
        stop.encode()
    except UnicodeEncodeError as error:
        raise JobError(f"the stop {stop!r} is no text: it has bytes that are not UTF-8") from error
    if special := next(_special_tokens(tokenizer, stop), None):
        hint = f"name {special!r} by itself, and the rest of the stop too, if it may end a text"
        raise JobError(f"the stop {stop!r} holds the special token {special!r}, which has no text; {hint}")
    written = tokenizer.decode(tokenizer.encode(stop))
    # Behind a letter, too, as decoders may leave out a space at the beginning of a text
    if written != stop and not tokenizer.decode(tokenizer.encode(f"a{stop}")).endswith(stop):
        message = f"the stop {stop!r} never stands in a text of this tokenizer, which writes {written!r}"
        raise JobError(f"{message}; give the text as the tokenizer writes it")


def _special_tokens(tokenizer: Tokenizer, stop: str) -> Iterator[str]:
    """Yields the names within a text of tokens that decode to nothing, as far as they begin like `<|end|>` or `[SEP]`.

    Encoding would not show them: text that users write is never encoded as special tokens.
    """
    if not isinstance(tokenizer, KnowsTokens):
        return
    for start in (place for place, letter in enumerate(stop) if letter in "<["):
        for end in range(start + 1, len(stop) + 1):
            id_ = tokenizer.token_id(stop[start:end])
            if id_ is not None and not tokenizer.decode([id_]):
                yield stop[start:end]
