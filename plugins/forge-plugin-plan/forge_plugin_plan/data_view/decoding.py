"""Ids to text in which special tokens are seen."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from forge_core.contracts.data import Tokenizer

TOKENIZER_JSON = "tokenizer.json"
END_OF_TEXT = "<end of text>"
UNFINISHED, LONGEST = "\ufffd", 4
"""What bytes become that are no whole character, and the most bytes that one has."""


class Decoder:
    """Decodes ids with a tokenizer; without one, ids stay numbers.

    Tokens that decode to nothing, as special ones do, appear by their name, `<|im_end|>`, or else as `<end of text>` or
    by their number, `<id 7>`.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.end_of_text = None if tokenizer is None else tokenizer.end_of_text
        # Names of the tokenizer come last, and replace the general name of its end-of-text
        self._names = {} if tokenizer is None else {tokenizer.end_of_text: END_OF_TEXT} | _special_names(tokenizer)

    def pieces(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        """Returns texts in order, each with whether it is the name of a special token."""
        if self._tokenizer is None:
            return [(" ".join(map(str, ids)), False)]
        tokenizer, pieces = self._tokenizer, []
        for special, group in groupby(ids, self._is_special):
            run = list(group)
            if special:
                pieces += [(self._names.get(id_, f"<id {id_}>"), True) for id_ in run]
            else:  # together: a character may be several tokens
                pieces.append((tokenizer.decode(run), False))
        return pieces

    def text(self, ids: Sequence[int]) -> str:
        """Returns the ids as one text."""
        return "".join(text for text, _ in self.pieces(ids))

    def parts(self, ids: Sequence[int]) -> Iterator[tuple[str, bool, int]]:
        """Yields texts in order, each with whether it is the name of a special token, and of how many ids it is.

        Together they are the text of `pieces`. Nearly all are of one id: only those between which a character is
        divided stay together.
        """
        if self._tokenizer is None:
            yield from ((f"{id_} ", False, 1) for id_ in ids)
            return
        for special, group in groupby(ids, self._is_special):
            run = list(group)
            if special:
                yield from ((self._names.get(id_, f"<id {id_}>"), True, 1) for id_ in run)
            else:
                yield from ((text, False, count) for text, count in self._split(self._tokenizer, run))

    @staticmethod
    def _split(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[tuple[str, int]]:
        # Decoded with what stands before: some tokenizers leave out the space of a first token.
        before, start = 0, 0
        for end in range(1, len(ids) + 1):
            known, text = tokenizer.decode(ids[before:start]), tokenizer.decode(ids[before:end])
            # A character has at most four bytes, hence tokens: after that, the bytes are not UTF-8
            if text.endswith(UNFINISHED) and end < len(ids) and end - start < LONGEST:
                continue
            yield text[len(known) :], end - start
            before, start = start, end

    def _is_special(self, id_: int) -> bool:
        assert self._tokenizer is not None
        # Decoders that skip special tokens return nothing for them
        return id_ in self._names or not self._tokenizer.decode([id_])


def _special_names(tokenizer: Tokenizer) -> dict[int, str]:
    """Returns the names of the special tokens by id; empty for a tokenizer that saves no `tokenizer.json`.

    The tokenizer protocol has no names, but a tokenizer in Hugging Face's format writes them to this file.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        path = Path(folder, TOKENIZER_JSON)
        if not path.is_file():
            return {}
        added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens", [])
    # Other added tokens are ordinary text that is never divided
    return {token["id"]: token["content"] for token in added if token.get("special")}
