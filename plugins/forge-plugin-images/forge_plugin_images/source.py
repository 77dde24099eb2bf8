"""Base of the datasets of documents with images, videos or sounds: which of them are held out or left out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs
from attrs import field, frozen
from attrs.validators import and_, ge, lt

from forge_core.contracts.components import DatasetComponent, FilePath
from forge_core.contracts.errors import JobError, Problem
from forge_plugin_images.image_file import channel_problems
from forge_plugin_images.resize import AutoResize
from forge_plugin_images.video_kind import NO_CLIPS
from forge_plugin_vision import image_input

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Tokenizer
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_images.documents import ImageDocuments, Part
    from forge_plugin_images.processing import ImageProcessor
    from forge_plugin_images.records import ImageSource, Record
    from forge_plugin_images.tile_text import TileTexts
    from forge_plugin_images.video_kind import VideoComponent
    from forge_plugin_images.visuals import VisualSource
    from forge_plugin_vision import ImageInput

NO_TOKENIZER = 'texts need a tokenizer; add a table [data.tokenizer], for example with type = "bpe"'


def _off_or_at_least_two(_: Any, attribute: attrs.Attribute, value: int) -> None:
    if value < 0 or value == 1:
        raise ValueError(f"{attribute.name!r} must be 0 (off) or at least 2, not {value}")


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
class DocumentDataset(DatasetComponent):
    """Documents with images, videos or sounds, decoded when they are read.

    With `[data.packing]` that keeps documents apart (`best_fit`, `isolate`), rows have as many whole documents as fit
    by positions, patches and images; otherwise each document has its own row.
    """

    optional_columns: ClassVar[Collection[str]] = ("images",)
    """Settings of `columns` whose keys a record may lack."""

    split: str = "train"
    """Of a table, or of a dataset that is streamed: the split to train on."""
    folder: FilePath = ""
    """Where relative paths of images and videos start; empty: beside the file that names them."""
    held_out_every: int = field(default=0, validator=_off_or_at_least_two)
    """Hold out every n-th document, starting with the first; in a stream, of every file. 0: none."""
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

    def training_records(self) -> Iterator[Record]:
        """Yields the records that are not held out."""
        raise NotImplementedError

    def split_of_documents(self) -> Split:
        """Returns which documents are held out."""
        return Split(self.held_out_every, frozenset())

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

    def video_component(self) -> VideoComponent | None:
        """Returns the component that defines how the videos of documents are seen; None: they have none."""
        return None

    def tile_texts(self, tokenizer: Tokenizer) -> TileTexts | None:
        """Returns the tokens around images and their tiles; None: there are none."""
        return None

    def processor(self, seen: ImageInput) -> ImageProcessor:
        """Returns what turns images into patches for a model that has `seen` as its input.

        Where documents have no images, its key stands for the encoder's format, by which other visuals are measured.
        """
        from forge_plugin_images.processing import ImageProcessor

        return ImageProcessor(AutoResize().build(seen))

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks the tokenizer and the model's encoder."""
        if job.data.tokenizer is None:
            yield Problem("", NO_TOKENIZER)
        try:
            seen = image_input(job)
            if self.video_component() is not None and not seen.format.clips:
                yield Problem("video", NO_CLIPS)
            yield from self.visual_problems(seen)
        except JobError as error:
            yield Problem("", error.problems[0].message)

    def visual_problems(self, seen: ImageInput) -> Iterator[Problem]:
        """Yields what visuals of files cannot be for a model that has `seen` as its input."""
        yield from channel_problems(seen.format)
