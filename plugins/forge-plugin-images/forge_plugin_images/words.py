"""Words to draw, and which of them are held out."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

from attrs import frozen

from forge_core.contracts.errors import JobError, Problem
from forge_plugin_text import PythonStdlib


class WordSplit(NamedTuple):
    """Words of both parts, in an order without meaning."""

    training: list[str]
    held_out: list[str]


@frozen
class Words:
    """Different words."""

    words: frozenset[str]
    source: str
    """Where they are from, for errors."""

    def split(self, held_out: int) -> WordSplit:
        """Hold out the words with the smallest hashes, so that a longer list holds out nearly the same.

        Raises:
            JobError: no word is left to train on.
        """
        ordered = sorted(self.words, key=lambda word: (hashlib.sha256(word.encode()).digest(), word))
        if len(ordered) <= held_out:
            message = f"{held_out}, but {self.source} has {len(ordered)} different words; hold out fewer, or add words"
            raise JobError([Problem("held_out", message)])
        return WordSplit(ordered[held_out:], ordered[:held_out])


@cache  # a run needs them in each dataset and evaluation, and reading the sources takes a quarter of a second
def words_of_stdlib(least: int, greatest: int) -> Words:
    """Returns words with that many letters which Python's standard library has more than once."""
    word = re.compile(rf"(?<![A-Za-z])[A-Za-z]{{{least},{greatest}}}(?![A-Za-z])")
    counts: Counter[str] = Counter()
    for text in PythonStdlib().documents():
        counts.update(word.findall(text))
    return Words(frozenset(word for word, count in counts.items() if count > 1), "Python's standard library")


def words_of_file(path: str) -> Words:
    """Returns the words of a file, one a line.

    Raises:
        JobError: the file cannot be read.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        message = f"{path!r} cannot be read ({error}); it must be a text file with one word per line"
        raise JobError([Problem("words", message)]) from error
    return Words(frozenset(line.strip() for line in lines) - {""}, repr(path))
