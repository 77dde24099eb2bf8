"""The component template_name: its keys in a job file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, min_len

from forge_core import DatasetComponent, JobError, Problem
from forge_core.contracts.components import FilePath

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Documents


@frozen(kw_only=True)
class TemplateName(DatasetComponent):
    """The lines of a text file, as letters; each line is a document.

    Capitals become small letters, and all characters other than a to z become a space, so 28 ids suffice, and no
    tokenizer is needed.
    """

    path: FilePath = field(validator=min_len(1))
    """The text file, in UTF-8. A relative path starts at the current directory."""
    hold_out_every: int = field(default=10, validator=ge(2))
    """Every n-th line is held out for evaluation."""

    def build(self, context: BuildContext) -> Documents:
        from forge_plugin_template_name.letters import LetterDocuments

        held_out: list[str] = []
        training: list[str] = []
        for number, line in enumerate(self._lines(), 1):
            (training if number % self.hold_out_every else held_out).append(line)
        if not held_out:
            message = (
                f"{self.path!r} has {len(training)} lines with text, and every {self.hold_out_every}th is held out"
            )
            raise JobError([Problem("path", f"{message}; give a longer file")])
        return LetterDocuments(training, LetterDocuments(held_out))

    def _lines(self) -> list[str]:
        try:
            text = Path(self.path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise JobError([Problem("path", f"cannot read {self.path!r}: {error}; give a text file")]) from error
        return [line for line in text.splitlines() if line.strip()]
