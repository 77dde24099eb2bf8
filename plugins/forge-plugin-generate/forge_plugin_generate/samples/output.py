"""Prints samples on the terminal and writes them to a file for people; a model's text is escaped.

Programs read `samples.jsonl` (see `forge_kit.tools.sampled_texts`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from forge_kit.tools.sampled_texts import SampledTexts, visible

FILE = "samples.txt"


def show(sampled: SampledTexts) -> None:
    """Print samples, prompts dim.

    They are printed through `sys.stdout`, and not through a separate rich console: while a progress line is live, rich
    redirects `sys.stdout` above that line.
    """
    console = Console(highlight=False)
    with console.capture() as capture:
        console.rule(f"samples after step {sampled.step:,}", style="dim")
        for each in sampled.texts:
            # The terminal wraps lines: text that is copied has no added line breaks
            console.print(Text.assemble((visible(each.prompt), "dim"), visible(each.text)), soft_wrap=True)
            console.rule(style="dim")
    # Characters that the output cannot encode must not end the training with an error
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(capture.get().encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)


def keep(folder: Path, sampled: SampledTexts) -> Path:
    """Append samples to the text file of a run folder; returns its path."""
    path = folder / FILE
    with path.open("a", encoding="utf-8") as file:
        file.write(f"=== step {sampled.step} ===\n{sampled.for_people()}\n\n")
    return path
