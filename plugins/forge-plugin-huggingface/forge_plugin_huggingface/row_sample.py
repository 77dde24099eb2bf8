"""Counts of a few rows of a dataset, for `forge-run plan`."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_plugin_huggingface.counts import RowCounts
from forge_plugin_huggingface.hub import explained
from forge_plugin_huggingface.problems import FORMATS
from forge_plugin_huggingface.rows import SourceRow, StreamRows, stream_rows
from forge_plugin_huggingface.source import Origin, files_of

if TYPE_CHECKING:
    from forge_plugin_huggingface.encoding import Encoder
    from forge_plugin_huggingface.part import SplitPart

ROWS = 512
"""Rows of a sample."""
FILES = 8
"""Files that a sample is taken from at most, evenly over all."""
BATCH = 64
"""Rows that are encoded at once."""


@frozen
class RowSample:
    """The first rows of some files, encoded."""

    counts: RowCounts
    is_whole: bool
    """Whether these are all rows."""

    @classmethod
    def of(cls, origin: Origin, part: SplitPart, encoder: Encoder) -> RowSample:
        """Read and encode a sample of a part; nothing is cached, and no network is used.

        Raises:
            JobError: the rows are not on this machine, or cannot be read or encoded.
        """
        _check_local(origin)
        # A stream has no parts such as `train[:90%]`; rows of the whole split stand for one
        split, _, piece = part.split.partition("[")
        with explained(origin.path):
            rows = stream_rows(origin.open().stream(split), encoder.columns, repr(origin.path), lanes=FILES)
            sampled = list(_first_rows(rows, part))
        counts = RowCounts()
        for taken, _ in sampled:
            for start in range(0, len(taken), BATCH):
                for encoded in encoder.encode(taken[start : start + BATCH]):
                    counts.add(encoded)
        is_whole = not piece and len(sampled) == rows.files and all(is_all for _, is_all in sampled)
        return cls(counts, is_whole)

    def describe(self) -> str:
        """Returns `of a sample of 512 rows: 512 documents, 41.2% of 61,204 tokens learned`."""
        which = f"all {self.counts.rows:,}" if self.is_whole else f"a sample of {self.counts.rows:,}"
        return f"of {which} rows: {self.counts.describe()}"


def _first_rows(rows: StreamRows, part: SplitPart) -> Iterator[tuple[list[SourceRow], bool]]:
    """Yields the first rows of some files, and whether a file has no more."""
    # A set, as numbers repeat where there are fewer files
    files = sorted({number * rows.files // FILES for number in range(FILES)})
    each = -(-ROWS // len(files))
    for file in files:
        # One more, which shows whether there is one
        taken = [row for _, row in islice(rows.read(file, wanted=part.has), each + 1)]
        yield taken[:each], len(taken) <= each


def _check_local(origin: Origin) -> None:
    """Raise `JobError` for rows of the hub or of a server, and for files that do not exist."""
    named = files_of(origin.data_files)
    is_folder = Path(origin.path).is_dir()
    if any("://" in name for name in named) or not (is_folder or origin.path in FORMATS):
        raise JobError("the rows are not on this machine, and a plan uses no network")
    folder = Path(origin.path) if is_folder else Path()
    for name in named:
        if not glob.has_magic(name) and not (folder / name).exists():
            raise JobError(f"{str(folder / name)!r} does not exist")
