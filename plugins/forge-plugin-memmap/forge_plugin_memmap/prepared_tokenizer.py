"""Tokenizer `prepared`: the one that data was prepared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field, frozen

from forge_core.contracts.components import FilePath, TokenizerComponent, when_resumed
from forge_core.contracts.errors import JobError, Problem
from forge_plugin_memmap.manifest import TOKENIZER, read_prepared

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Tokenizer
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


@frozen(kw_only=True)
class PreparedTokenizer(TokenizerComponent):
    """The tokenizer of a folder that `forge-run data prepare` wrote, whatever its type. It is never trained again."""

    path: FilePath = field(metadata=when_resumed("safe"))
    """The folder. A relative path starts at the current directory. A continued run has its own copy."""

    def build(self, context: BuildContext, documents: Callable[[], Iterable[str]]) -> Tokenizer:
        """Raises `JobError` where `problems` finds one, or the tokenizer's distribution is not installed."""
        from forge_plugin_memmap.tokenizer_folder import load_kept

        if problems := list(self._folder_problems()):
            raise JobError(problems)
        return load_kept(Path(self.path, TOKENIZER))

    def load(self, context: BuildContext, folder: Path) -> Tokenizer:
        """Loads the copy in the folder of the run, with the component that made it; `path` is not read."""
        from forge_plugin_memmap.tokenizer_folder import load_kept

        return load_kept(folder)

    def expected_vocab_size(self) -> int | None:
        """Returns the size in the manifest; None if the folder cannot be used."""
        try:
            prepared = read_prepared(self.path)
        except JobError:  # `problems` reports it
            return None
        return prepared.manifest["tokenizer"]["vocab_size"] if prepared else None

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that `data prepare` wrote the folder, and finished it."""
        return self._folder_problems()

    def _folder_problems(self) -> Iterable[Problem]:
        try:
            prepared = read_prepared(self.path)
        except JobError as error:
            return [problem.below("path") for problem in error.problems]
        if prepared is not None:
            return []
        fault = "is no folder" if Path(self.path).exists() else "does not exist; give a folder"
        return [Problem("path", f"{self.path!r} {fault} that forge-run data prepare wrote")]
