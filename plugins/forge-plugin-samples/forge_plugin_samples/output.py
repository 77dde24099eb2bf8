"""Prints samples on the terminal and writes them to a file. A model's text is escaped: no markup, no control codes."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

Sample = tuple[str, str]
"""A prompt, and the model's continuation."""
RULE = "-" * 40
"""Between the samples of one step, in the file."""


def show(step: int, samples: Sequence[Sample]) -> None:
    """Print samples, prompts dim.

    Through `sys.stdout`, and not through a rich console of its own: while a progress line is live, rich redirects it
    above that line.
    """
    console = Console(highlight=False)
    with console.capture() as capture:
        console.rule(f"samples after step {step:,}", style="dim")
        for prompt, text in samples:
            console.print(Text.assemble((visible(prompt), "dim"), visible(text)), soft_wrap=True)
            console.rule(style="dim")
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(capture.get().encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)


def keep(path: Path, step: int, samples: Sequence[Sample]) -> None:
    """Append samples to a file."""
    texts = f"\n{RULE}\n".join(visible(prompt + text) for prompt, text in samples)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"=== step {step} ===\n{texts}\n\n")


def visible(text: str) -> str:
    """Escapes control characters, except for line breaks and tabs, and lone surrogates."""
    return "".join(_written_out(char) if _is_hidden(char) else char for char in text)


def _is_hidden(char: str) -> bool:
    return char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cs")


def _written_out(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
