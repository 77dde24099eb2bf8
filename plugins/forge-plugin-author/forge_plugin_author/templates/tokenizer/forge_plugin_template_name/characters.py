"""What the component builds."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

END, OTHER, FIRST = 0, 1, 2
"""Ids: end-of-text, any character that is not known, and the first one that is."""
FILE = "characters.json"


class CharacterTokenizer:
    """See `forge_core.contracts.data.Tokenizer`."""

    end_of_text = END

    def __init__(self, characters: str) -> None:
        """Args: `characters`, those that have ids, in their order."""
        self.characters = characters
        self.vocab_size = FIRST + len(characters)
        self._ids = {character: FIRST + number for number, character in enumerate(characters)}

    @classmethod
    def of(cls, texts: Iterable[str], size: int) -> CharacterTokenizer:
        """The most frequent characters of the texts, `size` tokens at most; of equally frequent ones the smaller."""
        counts = Counter(character for text in texts for character in text)
        ranked = sorted(counts, key=lambda character: (-counts[character], character))
        return cls("".join(ranked[: size - FIRST]))

    @classmethod
    def load(cls, folder: Path) -> CharacterTokenizer:
        """The one that was saved there."""
        return cls(json.loads((folder / FILE).read_text(encoding="utf-8")))

    def save(self, folder: Path) -> None:
        """Write what `load` needs."""
        (folder / FILE).write_text(json.dumps(self.characters), encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(character, OTHER) for character in text]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text; unknown characters become U+FFFD, end-of-text becomes nothing."""
        return "".join("\ufffd" if id_ == OTHER else self.characters[id_ - FIRST] for id_ in ids if id_ != END)

    def fingerprint(self) -> str:
        return hashlib.sha256(self.characters.encode()).hexdigest()
