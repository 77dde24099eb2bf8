"""Base of the datasets of images in files: locations, resizing, and which documents are held out or left out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs
from attrs import field, frozen
from attrs.validators import and_, ge, gt, lt, optional

from forge_core.contracts.components import DatasetComponent, FilePath, when_resumed
from forge_core.contracts.errors import JobError, Problem
from forge_kit.tools.rank_zero import from_rank0, is_checked_elsewhere
from forge_plugin_images.image_file import MAX_PIXELS, GreyRange, channel_problems
from forge_plugin_images.resize import AutoResize, ResizeComponent
from forge_plugin_images.source_files import files_of, find_source, is_saved, open_records
from forge_plugin_images.stream_problems import stream_problems
from forge_plugin_images.tile_text import TileText, TileTexts, row_problems
from forge_plugin_vision import image_input

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Dataset, Stream, Tokenizer
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_kit.data.budgets import Budgets
    from forge_kit.data.damage import Decodable
    from forge_plugin_images.documents import ImageDocuments, Part
    from forge_plugin_images.processing import ImageProcessor
    from forge_plugin_images.records import ImageSource, Record, Records
    from forge_plugin_images.video_kind import VideoComponent
    from forge_plugin_images.visuals import VisualSource
    from forge_plugin_vision import ImageInput

NO_TOKENIZER = 'texts need a tokenizer; add a table [data.tokenizer], for example with type = "bpe"'


def _off_or_at_least_two(_: Any, attribute: attrs.Attribute, value: int) -> None:
    if value < 0 or value == 1:
        raise ValueError(f"{attribute.name!r} must be 0 (off) or at least 2, not {value}")


def _black_below_white(_: Any, attribute: attrs.Attribute, value: GreyRange) -> None:
    if not value[0] < value[1]:
        raise ValueError(f"{attribute.name!r} must be [black, white], the lower value first, not {list(value)}")


@frozen
class Split:
    """Holds out every `every`-th document, starting with the first, or those whose names are listed."""

    every: int
    names: frozenset[str]

    def holds_out(self, number: int, record: Record | None = None) -> bool:
        """Whether a document is held out; the record is needed only where names are listed."""
        if self.every:
            return number % self.every == 0
        return record is not None and (record.place in self.names or record.file in self.names)


@frozen(kw_only=True)
class ImageDataset(DatasetComponent):
    """Documents with images, decoded when they are read.

    With `[data.packing]` that keeps documents apart (`best_fit`, `isolate`), rows have as many whole documents as fit
    by positions, patches and images; otherwise each document has its own row.
    """

    optional_columns: ClassVar[Collection[str]] = ("images",)
    """Settings of `columns` whose keys a record may lack."""

    path: FilePath | tuple[FilePath, ...]
    """Files, folders and globs, one or a list: JSON lines, tar shards, Parquet, a folder of `save_to_disk`, or a folder
    of images or videos with texts beside them."""
    split: str = "train"
    """Of a stream or a table, Parquet or `save_to_disk`: the split to train on."""
    folder: FilePath = ""
    """Where relative paths of images and videos start; empty: beside the file that names them."""
    resize: ResizeComponent = field(factory=AutoResize)
    """`[data.sources.resize]`: how images get their size."""
    tile_text: TileText | None = None
    """`[data.sources.tile_text]`: texts around images and their tiles, such as `<row_1_col_1>`; None: none."""
    grey_range: GreyRange | None = field(default=None, validator=optional(_black_below_white))
    """In greys of more than 8 bits: the values that are black and white, such as [0, 4095] for 12 bits. Left out: the
    values that the file declares, if any; 16 bits lose the lower 8, and others are refused."""
    max_pixels: int = field(default=MAX_PIXELS, validator=gt(0))
    """Images with more pixels cannot be read. A worker takes 4 to 20 bytes for each pixel, by format."""
    held_out_every: int = field(default=0, validator=_off_or_at_least_two)
    """Hold out every n-th document, starting with the first; in a stream, of every file. 0: none."""
    held_out_list: FilePath = ""
    """File that names the documents to hold out, one a line: `data/a.jsonl:17`, or a file for all in it."""
    streaming: bool = False
    """Whether to read the data during training, as the dataset `huggingface` does, instead of measuring it before.
    `path` is then what that one's is: a folder, a name on the hub, or a format whose files `data_files` names."""
    config: str = ""
    """With `streaming`: configuration of the dataset, if it has several."""
    revision: str = ""
    """With `streaming`: branch, tag or commit on the hub; empty: its default branch."""
    data_files: FilePath | tuple[FilePath, ...] | Mapping[str, FilePath] = ()
    """With `streaming`: files or globs, relative to `path`: one, a list, or one for each split."""
    held_out_split: str = ""
    """With `streaming`: the split to evaluate on; empty: none."""
    held_out_documents: int = field(default=0, validator=ge(0))
    """With `streaming`: held-out documents at most, which are kept in the cache; 0: all of `held_out_split`."""
    lanes: int = field(default=0, validator=ge(0), metadata=when_resumed("impossible"))
    """With `streaming`: readers, each with its own documents, that fill the global batch; a divisor of its size, and
    preferably of the number of files too. 0: `train.global_batch_size`."""
    shuffle: int = field(default=0, validator=ge(0), metadata=when_resumed("impossible"))
    """With `streaming`: documents that each lane reads ahead, images included, and shuffles, and its files too. 0:
    documents in the order of the files."""
    too_long: Literal["stop", "cut", "skip"] = "stop"
    """Documents that a row has no room for: end the run before it starts, cut off what does not fit (never within an
    image), or leave them out."""
    unreadable: Literal["stop", "skip"] = "stop"
    """Documents with images or videos that cannot be read: end the run, or leave them out, named in the log and counted
    by the metric `data/unreadable`."""
    max_unreadable: float = field(default=0.01, validator=and_(ge(0.0), lt(1.0)))
    """With `unreadable = "skip"`: share of the documents above which the run ends all the same."""

    @property
    def skips_unreadable(self) -> bool:
        """Whether documents that cannot be read are left out."""
        return self.unreadable == "skip"

    def parts(self, record: Record, visuals: VisualSource, tokenizer: Tokenizer) -> Iterable[Part]:
        """Yields runs of tokens and visuals of a record's document, in order, without the end-of-text."""
        raise NotImplementedError

    def columns(self) -> Mapping[str, str]:
        """Returns the keys of a record that `parts` reads, by the settings that name them."""
        raise NotImplementedError

    def layout_key(self) -> list[object]:
        """Returns the keys that `parts` depends on."""
        raise NotImplementedError

    def build(self, context: BuildContext) -> Dataset | Stream:
        """Returns rows of documents, measured once and kept in the cache, or a stream of them.

        Raises:
            JobError: the files cannot be read, or do not match the job.
        """
        from forge_plugin_images.dataset_rows import image_rows

        if self.streaming:
            from forge_plugin_images.streaming import image_stream

            return image_stream(self, context)
        # Collective: all ranks must reach it
        found = from_rank0(context, lambda: find_source(self._patterns, self.folder, self.split))
        records = open_records(found, self._patterns, self.folder, self.split)
        return image_rows(self, context, self.documents_of(context, records))

    def budgets(self, context: BuildContext) -> Budgets | None:
        """See `forge_kit.data.budgets.HasBudgets`."""
        from forge_plugin_images.budgets import image_budgets

        return None if self.streaming else image_budgets(self, context)

    def left_out(self) -> Mapping[str, int]:
        """See `forge_kit.data.data_files.ListsFiles`."""
        from forge_kit.data.data_files import FileFinder

        if self.streaming:
            from forge_plugin_images.streaming import origin_of

            return origin_of(self).open().left_out
        finder = FileFinder()
        if not is_saved(self._patterns):
            files_of(self._patterns, finder)
        return finder.left_out

    def decodable(self, context: BuildContext) -> Decodable | None:
        """See `forge_kit.data.damage.HasDecodable`."""
        from forge_kit.data.damage import Decodable

        if self.streaming:
            return None
        documents = self.documents_of(context, self.records())
        allowed = self.max_unreadable if self.skips_unreadable else 0.0
        return Decodable(documents=documents, key="max_unreadable" if allowed else "unreadable", allowed=allowed)

    def documents_of(
        self, context: BuildContext, records: ImageSource, *, all_held_out: bool = False
    ) -> ImageDocuments:
        """Returns the documents of records, of which all may be held out.

        Raises:
            JobError: there is no tokenizer.
        """
        from forge_plugin_images.documents import Clips, ImageDocuments
        from forge_plugin_images.rows import Needs

        tokenizer = context.tokenizer
        if tokenizer is None:
            raise JobError(NO_TOKENIZER)
        seen = image_input(context.job)
        room = Needs(context.job.train.seq_len, seen.patches_per_sequence, seen.images_per_sequence)
        clips, component = None, self.video_component()
        if component is not None:
            # `data.seed` lets runs with different initial weights see the same frames.
            seed = context.job.job.seed if context.job.data.seed is None else context.job.data.seed
            videos = component.build(seen, tokenizer)
            # Every first document: all of them
            held_out = Split(1, frozenset()) if all_held_out else self.split_of_documents()
            clips = Clips(component, videos, seed, held_out)
        return ImageDocuments(
            records=records,
            layout=self,
            tokenizer=tokenizer,
            processor=self.processor(seen),
            seen=seen,
            # Otherwise documents are measured whole, to be refused or left out by their needs.
            room=room if self.too_long == "cut" else None,
            clips=clips,
            texts=self.tile_texts(tokenizer),
        )

    def tile_texts(self, tokenizer: Tokenizer) -> TileTexts | None:
        """Returns the tokens around images and their tiles; None: there are none."""
        return None if self.tile_text is None else TileTexts(self.tile_text, tokenizer)

    def video_component(self) -> VideoComponent | None:
        """Returns the component that defines how the videos of documents are seen; None: they have none."""
        return None

    def records(self) -> Records:
        """Open the records; raises `JobError` if there are none."""
        found = find_source(self._patterns, self.folder, self.split)
        return open_records(found, self._patterns, self.folder, self.split)

    def split_of_documents(self) -> Split:
        """Returns which documents are held out."""
        return Split(self.held_out_every, _names(self.held_out_list) if self.held_out_list else frozenset())

    def training_records(self) -> Iterator[Record]:
        """Yields the records that are not held out."""
        if self.streaming:
            from forge_plugin_images.streaming import training_records

            yield from training_records(self)
            return
        records, split = self.records(), self.split_of_documents()
        for number in range(len(records)):
            if not split.holds_out(number, record := records[number]):
                yield record

    def processor(self, seen: ImageInput) -> ImageProcessor:
        """Returns what turns images into patches for a model that has `seen` as its input."""
        from forge_plugin_images.decoding import ImageDecoder
        from forge_plugin_images.processing import ImageProcessor

        return ImageProcessor(self.resize.build(seen), ImageDecoder(self.grey_range, self.max_pixels))

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks the tokenizer, the model's encoder, keys of streams, and that the files are there."""
        if job.data.tokenizer is None:
            yield Problem("", NO_TOKENIZER)
        try:
            yield from self.image_problems(image_input(job))
        except JobError as error:
            yield Problem("", error.problems[0].message)
        yield from stream_problems(self, job)
        # Rank 0 lists the files: many ranks would load a shared file system.
        if not self.streaming and not is_checked_elsewhere():
            yield from self._path_problems()
        if self.held_out_list and self.held_out_every:
            yield Problem(
                "held_out_list", f"held_out_every = {self.held_out_every} is set as well; keep one of the two"
            )
        if self.held_out_list and not Path(self.held_out_list).is_file():
            yield Problem(
                "held_out_list", f"{self.held_out_list!r} does not exist (looked from {Path.cwd()}); correct the path"
            )

    def image_problems(self, seen: ImageInput) -> Iterator[Problem]:
        """Yields what images of files cannot be for a model that has `seen` as its input."""
        yield from channel_problems(seen.format)
        yield from (problem.below("resize") for problem in self.resize.share_problems(seen))
        if self.tile_text is not None:
            yield from (problem.below("tile_text") for problem in row_problems(self.tile_text, seen))

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
