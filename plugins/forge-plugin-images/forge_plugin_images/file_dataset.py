"""Datasets of documents in files, which are measured before they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from forge_core.contracts.components import FilePath
from forge_core.contracts.errors import JobError, Problem
from forge_kit.tools.rank_zero import from_rank0, is_checked_elsewhere
from forge_plugin_images.source import DocumentDataset, Split
from forge_plugin_images.source_files import files_of, find_source, is_saved, open_records

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Dataset
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_kit.data.budgets import Budgets
    from forge_kit.data.damage import Decodable
    from forge_plugin_images.records import Record, Records


@frozen(kw_only=True, slots=False)
class FileDataset(DocumentDataset):
    """Documents in files: lines, members of archives, rows of tables, or files beside each other."""

    path: FilePath | tuple[FilePath, ...]
    """Files, folders and globs, one or a list: JSON lines, tar shards, Parquet, a folder of `save_to_disk`, or a folder
    of images or videos with texts beside them."""
    held_out_list: FilePath = ""
    """File that names the documents to hold out, one a line: `data/a.jsonl:17`, or a file for all in it."""

    def build(self, context: BuildContext) -> Dataset:
        """Returns rows of documents, measured once and kept in the cache.

        Raises:
            JobError: the files cannot be read, or do not match the job.
        """
        from forge_plugin_images.dataset_rows import image_rows

        # Collective: all ranks must reach it
        found = from_rank0(context, lambda: find_source(self._patterns, self.folder, self.split))
        records = open_records(found, self._patterns, self.folder, self.split)
        return image_rows(self, context, self.documents_of(context, records))

    def budgets(self, context: BuildContext) -> Budgets | None:
        """See `forge_kit.data.budgets.HasBudgets`."""
        from forge_plugin_images.budgets import image_budgets

        return image_budgets(self, context)

    def left_out(self) -> Mapping[str, int]:
        """See `forge_kit.data.data_files.ListsFiles`."""
        from forge_kit.data.data_files import FileFinder

        finder = FileFinder()
        if not is_saved(self._patterns):
            files_of(self._patterns, finder)
        return finder.left_out

    def decodable(self, context: BuildContext) -> Decodable | None:
        """See `forge_kit.data.damage.HasDecodable`."""
        from forge_kit.data.damage import Decodable

        documents = self.documents_of(context, self.records())
        allowed = self.max_unreadable if self.skips_unreadable else 0.0
        return Decodable(documents=documents, key="max_unreadable" if allowed else "unreadable", allowed=allowed)

    def records(self) -> Records:
        """Open the records; raises `JobError` if there are none."""
        found = find_source(self._patterns, self.folder, self.split)
        return open_records(found, self._patterns, self.folder, self.split)

    def split_of_documents(self) -> Split:
        """Includes the documents of `held_out_list`."""
        return Split(self.held_out_every, _names(self.held_out_list) if self.held_out_list else frozenset())

    def training_records(self) -> Iterator[Record]:
        """Yields them from the files."""
        records, split = self.records(), self.split_of_documents()
        for number in range(len(records)):
            if not split.holds_out(number, record := records[number]):
                yield record

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that the files are there, too."""
        yield from super().problems(job, layout)
        # Rank 0 lists the files: many ranks would load a shared file system.
        if not is_checked_elsewhere():
            yield from self._path_problems()
        if self.held_out_list and self.held_out_every:
            yield Problem(
                "held_out_list", f"held_out_every = {self.held_out_every} is set as well; keep one of the two"
            )
        if self.held_out_list and not Path(self.held_out_list).is_file():
            yield Problem(
                "held_out_list", f"{self.held_out_list!r} does not exist (looked from {Path.cwd()}); correct the path"
            )

    @property
    def _patterns(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path

    def _path_problems(self) -> Iterator[Problem]:
        try:
            takes_split = is_saved(self._patterns) or files_of(self._patterns)[0] == ".parquet"
        except JobError as error:
            yield from error.problems
            return
        if self.split != "train" and not takes_split:
            yield Problem("split", f"{self.split!r}, but only tables have splits; leave it out, or name other files")


def _names(path: str) -> frozenset[str]:
    """Returns the names in a held-out list: one a line; `#` starts a comment line."""
    lines = (line.strip() for line in Path(path).read_text("utf-8").splitlines())
    return frozenset(line for line in lines if line and not line.startswith("#"))
