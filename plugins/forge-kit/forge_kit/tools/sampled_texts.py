"""Texts that a model wrote during training: `samples.jsonl` of a run folder, which only this module reads and writes.

The hook `samples` writes them, and reports read them. A model may write any characters: show them by `visible`.
"""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from attrs import asdict, frozen

from forge_core.files import lines_from_end

FILE = "samples.jsonl"
"""A `SampledTexts` per line."""
RULE = "-" * 40
"""Between the texts of one step where they are shown as one text."""


@frozen(kw_only=True)
class SampledText:
    """A prompt and its continuation."""

    prompt: str
    text: str


@frozen(kw_only=True)
class SampledTexts:
    """The texts of one step, in the order of the prompts."""

    step: int
    texts: tuple[SampledText, ...]

    def append(self, folder: Path) -> None:
        """Append them to the records of a run folder."""
        # Appending writes at the end, wherever the search for a line break has left the position
        with (folder / FILE).open("a+b") as file:
            if end := file.seek(0, os.SEEK_END):
                file.seek(end - 1)
                file.write(b"" if file.read(1) == b"\n" else b"\n")  # after what a killed process did not complete
            # `dumps` escapes all but ASCII: a model may write a lone surrogate, which UTF-8 cannot encode
            file.write(f"{json.dumps(asdict(self))}\n".encode())

    def for_people(self) -> str:
        """Returns prompts and continuations as one visible text."""
        return f"\n{RULE}\n".join(visible(each.prompt + each.text) for each in self.texts)


def last_samples(folder: Path, count: int) -> list[SampledTexts]:
    """Returns the records of the last `count` times that a run sampled, the newest first; none if it never did."""
    try:
        with (folder / FILE).open("rb") as file:
            return list(islice(_records(line for _, line in lines_from_end(file)), count))
    except FileNotFoundError:
        return []


def _records(lines: Iterator[bytes]) -> Iterator[SampledTexts]:
    next(lines)  # empty, or what a killed process did not complete
    for line in lines:
        try:
            record = json.loads(line)
            texts = tuple(SampledText(prompt=each["prompt"], text=each["text"]) for each in record["texts"])
            yield SampledTexts(step=record["step"], texts=texts)
        except (ValueError, LookupError, TypeError):  # what a killed process did not complete
            continue


def visible(text: str) -> str:
    """Escapes control characters, except for line breaks and tabs, and lone surrogates."""
    return "".join(_escape(char) if _is_hidden(char) else char for char in text)


def _is_hidden(char: str) -> bool:
    return char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cs")


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
