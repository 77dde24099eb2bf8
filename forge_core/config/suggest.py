"""What a misspelt word was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SURE = 0.8
"""Similarity from which a word is rather a misspelling than another word."""


def closest(word: str, options: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar option, if one is similar enough; capitals and dashes do not count."""
    plain = {_plain(option): option for option in sorted(options)}
    found = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def did_you_mean(word: str, options: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean 'momentum'?`, or nothing."""
    found = closest(word, options, cutoff)
    return f"; did you mean {found!r}?" if found else ""


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")
