"""Datasets of documents that are read during training, as the dataset `huggingface` reads texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import FilePath, when_resumed
from forge_core.contracts.errors import Problem
from forge_core.data.packing import WindowPacking
from forge_kit.tools.rank_zero import is_checked_elsewhere
from forge_plugin_images.source import DocumentDataset

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Stream
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_images.records import Record

FORMATS = ("arrow", "imagefolder", "json", "parquet", "webdataset")
"""Formats that `path` may name, with the files in `data_files`."""


@frozen(kw_only=True, slots=False)
class StreamDataset(DocumentDataset):
    """Documents of a Hugging Face dataset, read during training instead of measured before. Needs its plugin."""

    path: FilePath
    """As of the dataset `huggingface`: a folder, a name on the hub, or a format whose files `data_files` names."""
    config: str = ""
    """Configuration of the dataset, if it has several."""
    revision: str = ""
    """Branch, tag or commit on the hub; empty: its default branch."""
    data_files: FilePath | tuple[FilePath, ...] | Mapping[str, FilePath] = ()
    """Files or globs, relative to `path`: one, a list, or one for each split."""
    held_out_split: str = ""
    """The split to evaluate on; empty: none."""
    held_out_documents: int = field(default=0, validator=ge(0))
    """Held-out documents at most, which are kept in the cache; 0: all of `held_out_split`."""
    lanes: int = field(default=0, validator=ge(0), metadata=when_resumed("impossible"))
    """Readers, each with its own documents, that fill the global batch; a divisor of its size, and preferably of the
    number of files too. 0: `train.global_batch_size`."""
    shuffle: int = field(default=0, validator=ge(0), metadata=when_resumed("impossible"))
    """Documents that each lane reads ahead, images included, and shuffles, and its files too. 0: documents in the order
    of the files."""

    def build(self, context: BuildContext) -> Stream:
        """Returns the stream, with its held-out rows.

        Raises:
            JobError: the data cannot be read, or does not match the job.
        """
        from forge_plugin_images.streaming import image_stream

        return image_stream(self, context)

    def budgets(self, context: BuildContext) -> None:
        """See `forge_kit.data.budgets.HasBudgets`: unknown until documents are read."""

    def decodable(self, context: BuildContext) -> None:
        """See `forge_kit.data.damage.HasDecodable`: documents cannot be had by number."""

    def left_out(self) -> Mapping[str, int]:
        """See `forge_kit.data.data_files.ListsFiles`."""
        from forge_plugin_images.streaming import origin_of

        return origin_of(self).open().left_out

    def training_records(self) -> Iterator[Record]:
        """Yields them once, in the order of the files."""
        from forge_plugin_images.streaming import training_records

        yield from training_records(self)

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks the keys, without the network and without reading rows."""
        yield from super().problems(job, layout)
        if find_spec("forge_plugin_huggingface") is None:
            hint = "pip install forge-plugin-huggingface"
            yield Problem("", f"streams are read by forge-plugin-huggingface, which is not installed; {hint}")
            return
        if not is_checked_elsewhere():
            yield from self._path_problems()
        yield from self._held_out_problems()
        rows, packing = job.train.global_batch_size, job.data.packing
        if self.lanes and rows % self.lanes:
            yield Problem("lanes", f"{self.lanes} does not divide train.global_batch_size = {rows}")
        # A window over documents in order is all that a stream can pack.
        if packing.isolates and not isinstance(packing, WindowPacking):
            message = "[data.packing] needs all documents at once, which a stream has not"
            hint = 'take "isolate", with which a row has the documents that follow each other while they fit'
            yield Problem("", f"{message}; {hint}, or a dataset of files")

    def _path_problems(self) -> Iterator[Problem]:
        from forge_plugin_huggingface.hub import local_problem

        if self.path in FORMATS and not Path(self.path).is_dir():
            if not self.data_files:
                yield Problem("data_files", f"path = {self.path!r} is a format; name the files that have it")
        elif message := local_problem(self.path):
            yield Problem("path", message)

    def _held_out_problems(self) -> Iterator[Problem]:
        split, every = self.held_out_split, self.held_out_every
        if split and every:
            yield Problem("held_out_split", f"held_out_every = {every} is set as well; keep one of the two")
        elif split == self.split:
            yield Problem("held_out_split", f"{split!r} is the training split; name another split")
        elif self.held_out_documents and not (split or every):
            yield Problem("held_out_documents", "nothing is held out; set held_out_split or held_out_every")
        elif every and not self.held_out_documents:
            message = "with held_out_every, a stream would be read to its end to find them; say how many are enough"
            yield Problem("held_out_documents", message)
