"""Ids to text in which special tokens are seen."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from forge_core.contracts.data import Tokenizer

TOKENIZER_JSON = "tokenizer.json"
END_OF_TEXT = "<end of text>"


class Decoder:
    """Decodes ids with a tokenizer; without one, ids stay numbers.

    Tokens that decode to nothing, as special ones do, appear by their name, `<|im_end|>`, or else as `<end of text>` or
    by their number, `<id 7>`.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.end_of_text = None if tokenizer is None else tokenizer.end_of_text
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

    def _is_special(self, id_: int) -> bool:
        assert self._tokenizer is not None
        return id_ in self._names or not self._tokenizer.decode([id_])


def _special_names(tokenizer: Tokenizer) -> dict[int, str]:
    """Names of the special tokens; those of tokenizers that save no `tokenizer.json` are not known.

    The protocol of tokenizers has no names, but a tokenizer of Hugging Face's format writes them.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        path = Path(folder, TOKENIZER_JSON)
        if not path.is_file():
            return {}
        added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens", [])
    return {token["id"]: token["content"] for token in added if token.get("special")}
