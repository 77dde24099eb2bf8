"""Documents of a source by number: measured by the headers of their visuals, or read with their pixels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from attrs import frozen

from forge_core.contracts.data import Tokenizer
from forge_core.contracts.errors import JobError
from forge_kit.data.tokenizers import begin_of_text
from forge_plugin_images.image_file import BrokenImage
from forge_plugin_images.processing import ImageProcessor
from forge_plugin_images.records import ImageSource, Record, Records
from forge_plugin_images.rows import Document, Footprint, Needs, Tokens
from forge_plugin_images.visuals import Visual, Visuals, VisualSource, as_one_document
from forge_plugin_vision import ImageInput

if TYPE_CHECKING:
    from forge_plugin_images.source import Split
    from forge_plugin_images.tile_text import TileTexts
    from forge_plugin_images.video_kind import VideoComponent, Videos

Part = Tokens | Visual


class Layout(Protocol):
    """Defines what a record's document consists of."""

    def parts(self, record: Record, visuals: VisualSource, tokenizer: Tokenizer) -> Iterable[Part]:
        """Yields runs of tokens and visuals, in order; raises `JobError` if the record has not what it needs."""

    def layout_key(self) -> list[object]:
        """Returns everything that parts depend on, other than record and tokenizer."""


class Measured(NamedTuple):
    """A document whose visuals have been looked at, but not decoded."""

    document: Document
    visuals: Sequence[Visual]
    text_bytes: int
    """UTF-8 bytes that its labels stand for; 0 where something was cut off, or where it is unknown."""
    is_cut: bool


@frozen
class Clips:
    """How the videos of documents are seen."""

    component: VideoComponent
    videos: Videos
    """What it has built."""
    seed: int
    held_out: Split
    """Documents whose frames are not drawn."""

    def draw(self, sample: str | None) -> str | None:
        """Returns what the frames of a document are drawn with; None: they are not."""
        return None if sample is None or not self.component.draws else f"{self.seed} {sample}"

    def key(self) -> list[object]:
        """Returns all that footprints depend on."""
        drawn = [self.seed, self.held_out.every, sorted(self.held_out.names)] if self.component.draws else []
        return [*self.component.key(), *drawn]


@frozen
class ImageDocuments:
    """The documents of records, one each: of all by number, or of single ones of a stream."""

    records: ImageSource
    """`Records` if documents are asked for by number."""
    layout: Layout
    tokenizer: Tokenizer
    processor: ImageProcessor
    seen: ImageInput
    room: Needs | None = None
    """What does not fit into it is cut off, never within a visual; None: nothing is."""
    clips: Clips | None = None
    """How videos are seen; None: documents have none."""
    texts: TileTexts | None = None
    """Texts around images and their tiles; None: there are none."""

    def __len__(self) -> int:
        assert isinstance(self.records, Records)
        return len(self.records)

    def measure(self, number: int) -> Measured:
        """Returns a document by the headers of its visuals; raises as `measure_record`."""
        record = self.record(number)
        # Held-out frames are not drawn, so that each evaluation has the same ones.
        is_drawn = self.clips is not None and not self.clips.held_out.holds_out(number, record)
        return self.measure_record(record, str(number) if is_drawn else None)

    def record(self, number: int) -> Record:
        """Returns a record by its number."""
        assert isinstance(self.records, Records)
        return self.records[number]

    def measure_record(self, record: Record, sample: str | None = None) -> Measured:
        """Returns the document of a record by the headers of its visuals.

        Args:
            record: of these documents.
            sample: what frames of videos are drawn by, together with the seed: equal in every process. None: they are
                not drawn.

        Raises:
            JobError: the record does not match the job.
            BrokenImage: the header of a visual cannot be read.
        """
        parts = self._parts(record, sample)
        sized = [part if isinstance(part, Tokens) else part.measure() for part in parts]
        kept = sized if self.room is None else list(_cut(sized, self.room))
        visuals = [part for part in parts if not isinstance(part, Tokens)]
        # Visuals are cut off from the end only, so the first ones are those that are kept.
        visuals = visuals[: sum(isinstance(part, Footprint) for part in kept)]
        document = Document.of(kept)
        is_cut = len(document.ids) < sum(map(_entries, sized))
        text_bytes = 0 if is_cut else sum(part.text_bytes for part in sized if isinstance(part, Tokens))
        return Measured(document, visuals, text_bytes, is_cut)

    def read(self, number: int) -> tuple[Document, list[np.ndarray]]:
        """Returns a document and the patches of its visuals; raises as `measure`."""
        measured = self.measure(number)
        return measured.document, self.patches(measured)

    def damage(self, number: int) -> list[str]:
        """See `forge_kit.data.damage.DecodableDocuments`: of all visuals, those that would be cut off too."""
        messages: list[str] = []
        try:
            record = self.record(number)
            # No frames are drawn: `check` decodes every frame that a draw might choose.
            parts = self._parts(record, None)
        except (JobError, BrokenImage) as error:
            return [str(error)]
        for part in parts:
            try:
                if not isinstance(part, Tokens):
                    part.check()
            except BrokenImage as error:
                messages.append(f"{record.place}: {error}")
        return messages

    def patches(self, measured: Measured) -> list[np.ndarray]:
        """Returns the (patches, V) uint8 of each visual; raises `BrokenImage` if one cannot be decoded."""
        return [visual.read() for visual in measured.visuals]

    def key(self) -> list[object]:
        """Returns all that documents depend on, but for the contents of files of images."""
        around = self.tokenizer.end_of_text, *begin_of_text(self.tokenizer)
        tokenizer = [self.tokenizer.fingerprint(), *around]
        # Adapter and fusion decide how many positions an image takes, so a change of either needs new measurements
        positions = [repr(self.seen.adapter), repr(self.seen.fusion)]
        room = list(self.room) if self.room else None
        assert isinstance(self.records, Records)
        of_clips = [] if self.clips is None else [self.clips.key()]
        own = [self.records.identity(), self.layout.layout_key(), tokenizer, self.processor.key(), positions, room]
        of_texts = [] if self.texts is None else [repr(self.texts.texts)]
        return [*own, *of_clips, *of_texts]

    def _parts(self, record: Record, sample: str | None) -> list[Part]:
        visuals = Visuals(self.records, self.processor, self.seen, self.texts)
        if self.clips is not None:
            visuals.videos, visuals.draw = self.clips.videos, self.clips.draw(sample)
        # All parts at once: the number of images in a document may decide how each of them is resized
        parts = as_one_document(list(self.layout.parts(record, visuals, self.tokenizer)))
        begin = begin_of_text(self.tokenizer)
        start = parts[0].ids[: len(begin)] if parts and isinstance(parts[0], Tokens) else ()
        if list(start) != begin:  # a chat's template writes it itself
            parts = [Tokens(begin, False), *parts]
        runs = [part for part in parts if isinstance(part, Tokens)]
        # End-of-text is a label only behind learned text, such as an answer.
        return [*parts, Tokens([self.tokenizer.end_of_text], bool(runs) and runs[-1].learned)]


def _entries(part: Tokens | Footprint) -> int:
    return len(part.ids) if isinstance(part, Tokens) else part.entries


def _cut(parts: Iterable[Tokens | Footprint], room: Needs) -> Iterator[Tokens | Footprint]:
    """Yields the parts that fit, the last of them maybe shortened. A visual has all of its grids or is left out."""
    entries, patches, images = room.positions + 1, room.patches, room.images  # the last entry is only a label
    for part in parts:
        length = _entries(part)
        if isinstance(part, Tokens):
            yield part._replace(ids=part.ids[:entries])
        else:
            patches, images = patches - part.patches, images - len(part.grids)
            # Everything behind it is cut off, too: texts there may refer to the visual.
            if length >= entries or patches < 0 or images < 0:
                return
            yield part
        entries -= length
        if entries <= 0:
            return
