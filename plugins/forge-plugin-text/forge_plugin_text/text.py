"""Dataset `text`: files of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from attrs import frozen

from forge_core.contracts.components import FilePath
from forge_core.contracts.errors import JobError, Problem
from forge_kit.data.data_files import left_out_note
from forge_plugin_text.listing import TextFile, find_files, left_out
from forge_plugin_text.reading import Reading
from forge_plugin_text.source import CorpusDataset

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext


@frozen(kw_only=True)
class Text(CorpusDataset):
    """Text from files: `.txt`, `.py` and `.md` are one document each, `.jsonl` one a line; `.gz` and `.zst` wrap any.

    `.tar` has one for each name, as `NAME.txt`, or `NAME.json` with the key `field` (shards of webdataset).

    Documents follow each other by name, each ended by the end-of-text token, and are cut into sequences of
    `train.seq_len` tokens. Empty documents are left out.
    """

    path: FilePath | tuple[FilePath, ...]
    """Files, folders and globs (`data/**/*.txt`): one, or a list. Relative ones start at the current directory."""
    field: str = "text"
    """The key of a JSON line that holds its text."""
    errors: Literal["strict", "replace"] = "strict"
    """Bytes that are not UTF-8: strict stops with the file and the offset, replace reads U+FFFD in their place."""

    def files(self) -> tuple[TextFile, ...]:
        """Lists the files of `path`; raises `JobError` also where all of them are empty."""
        patterns = self._patterns
        if not all(patterns) or not patterns:
            raise JobError([Problem("path", f"{self.path!r} names nothing; give a file, folder or glob, or a list")])
        try:
            files = find_files(patterns)
        except JobError as error:
            raise JobError(problem.below("path") for problem in error.problems) from error
        if all(file.stat().st_size == 0 for file in files):
            message = f"all {len(files)} files are empty (0 bytes), the first is {files[0].name!r}"
            raise JobError([Problem("path", f"{message}; give files with text")])
        return tuple(files)

    def reading(self) -> Reading:
        """Returns the settings of the keys `errors` and `field`."""
        return Reading(self.errors, self.field)

    def left_out(self) -> Mapping[str, int]:
        """See `forge_kit.data.data_files.ListsFiles`."""
        return left_out(self._patterns)

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        """Shows the number and size of files, and how many were left out or are empty."""
        facts = self.facts()
        notes = [left_out_note(facts.left_out), f"{facts.empty:,} empty" if facts.empty else ""]
        text = f"{facts.files:,} of text, {facts.size / 1e6:,.1f} MB"
        yield "files", text, ", ".join(filter(None, notes)) or "none left out"

    @property
    def _patterns(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path
