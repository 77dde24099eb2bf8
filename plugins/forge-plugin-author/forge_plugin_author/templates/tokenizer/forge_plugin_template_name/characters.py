"""A tokenizer of characters."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

END, OTHER, FIRST = 0, 1, 2
"""Ids of end-of-text, of all unknown characters, and of the first known one."""
FILE = "characters.json"


class CharacterTokenizer:
    """See `forge_core.contracts.data.Tokenizer`."""

    end_of_text = END

    def __init__(self, characters: str) -> None:
        """Assign ids to `characters`, in their order."""
        self.characters = characters
        self.vocab_size = FIRST + len(characters)
        self._ids = {character: FIRST + number for number, character in enumerate(characters)}

    @classmethod
    def of(cls, texts: Iterable[str], size: int) -> CharacterTokenizer:
        """Take the most frequent characters of the texts, for at most `size` tokens; the smaller among equals."""
        counts = Counter(character for text in texts for character in text)
        ranked = sorted(counts, key=lambda character: (-counts[character], character))
        return cls("".join(ranked[: size - FIRST]))

    @classmethod
    def load(cls, folder: Path) -> CharacterTokenizer:
        """Load the tokenizer that was saved in a folder."""
        return cls(json.loads((folder / FILE).read_text(encoding="utf-8")))

    def save(self, folder: Path) -> None:
        """Write the file that `load` reads."""
        (folder / FILE).write_text(json.dumps(self.characters), encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(character, OTHER) for character in text]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text; unknown characters become U+FFFD, and end-of-text is dropped."""
        return "".join("\ufffd" if id_ == OTHER else self.characters[id_ - FIRST] for id_ in ids if id_ != END)

    def fingerprint(self) -> str:
        return hashlib.sha256(self.characters.encode()).hexdigest()
