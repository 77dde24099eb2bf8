"""Tables of Hugging Face's datasets: Parquet, or a folder of `save_to_disk`. Needs forge-plugin-huggingface."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from forge_core.contracts.errors import JobError, Problem
from forge_kit.data.cache import digest_of
from forge_plugin_images.image_file import ImageFile
from forge_plugin_images.records import Record, embedded_image, file_at

if TYPE_CHECKING:
    import datasets

    from forge_plugin_huggingface.source import DescribedSource

FORMAT = 1
"""Part of the identity: increase it when the same tables are read differently."""


def describe_table(files: Sequence[str], saved: str, split: str) -> DescribedSource:
    """Returns what `Table.open` needs of a split of Parquet files, or of the folder `saved` of `save_to_disk`."""
    try:
        from forge_plugin_huggingface.source import DescribedSource, Origin
    except ImportError as error:
        message = "tables need forge-plugin-huggingface; pip install forge-plugin-huggingface"
        raise JobError([Problem("path", message)]) from error
    if files:  # their rows are read from the cache of datasets
        return DescribedSource.of(Origin("parquet", data_files=tuple(map(os.path.abspath, files))), [split])
    return DescribedSource.of(Origin(saved), [split], streamed=[split])


@frozen
class Table:
    """Rows of a table as records. It is mapped, also by a pickled copy, so that any row is read by itself."""

    path: str
    rows: datasets.Dataset
    fingerprint: str
    folder: str
    places: Sequence[str] = ()
    """Places of the rows, if the table holds rows of another dataset; empty: their numbers in this table."""

    @classmethod
    def open(cls, data: DescribedSource, path: str, split: str, folder: str) -> Table:
        """Open a split.

        Args:
            data: as `describe_table` returns it, on this rank or another one.
            path: a folder of `save_to_disk`, or a file of the table.
            split: name of the split; files have `train` only.
            folder: where relative paths of images start.
        """
        # As Arrow, images stay bytes: by themselves, datasets would decode them.
        rows = data.source.table(split).with_format("arrow")
        return cls(path, rows, data.fingerprints[split], folder)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Record:
        [values] = self.rows[[number]].to_pylist()
        return Record(self.places[number] if self.places else f"{self.path}:{number}", self.path, values)

    def image(self, record: Record, value: Any) -> ImageFile:
        """See `Records`."""
        found = embedded_image(record, value)
        return file_at(self.folder, found) if isinstance(found, str) else found

    def identity(self) -> str:
        """See `Records`: by the sizes and times of the table's files."""
        return digest_of(FORMAT, self.fingerprint)
