"""Chooses the documents that are held out of training."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from forge_plugin_text.reading import Document


@frozen
class Split:
    """Holds out every `every`-th document of the corpus, starting with the first, or those whose names are listed.

    A listed name is a document's or a file's; a file's name holds out all of its documents.
    """

    every: int = 0
    names: frozenset[str] = frozenset()

    @property
    def holds_out_any(self) -> bool:
        """Whether anything is to be held out; the corpus may still have no listed name."""
        return bool(self.every or self.names)

    def holds_out(self, number: int, document: Document) -> bool:
        """Whether the document, the `number`-th of the corpus counted from 0, is held out."""
        if self.every:
            return number % self.every == 0
        return document.name in self.names or document.file in self.names

    def key(self) -> list[object]:
        """Returns the settings that two equal splits share."""
        return [self.every, sorted(self.names)]


def read_names(path: Path) -> frozenset[str]:
    """Read the names in a held-out list: one a line; empty lines and lines that start with `#` are ignored.

    Raises:
        OSError: the list cannot be read.
        UnicodeDecodeError: it is not UTF-8.
    """
    lines = (line.strip() for line in path.read_text("utf-8").splitlines())
    return frozenset(line for line in lines if line and not line.startswith("#"))
