"""Documents of a source by number: measured by the headers of their images, or read with their pixels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from attrs import frozen

from forge_core.contracts.data import Tokenizer
from forge_kit.tokenizers import begin_of_text
from forge_plugin_images.decoding import ImageFile, decode, size_of
from forge_plugin_images.processing import ImageProcessor
from forge_plugin_images.records import ImageSource, Record, Records
from forge_plugin_images.rows import Document, Needs, Tokens
from forge_plugin_vision import Grid, ImageInput

Part = Tokens | ImageFile
Grids = tuple[Grid, ...]
"""Those of an image: one, or several if it is cut into tiles."""


class Layout(Protocol):
    """Says what a record's document consists of."""

    def parts(self, record: Record, records: ImageSource, tokenizer: Tokenizer) -> Iterable[Part]:
        """Yields runs of tokens and images, in order; raises `JobError` if the record has not what it needs."""

    def layout_key(self) -> list[object]:
        """Returns all that parts depend on, besides record and tokenizer."""


class Measured(NamedTuple):
    """A document whose images have been looked at, but not decoded."""

    document: Document
    images: Sequence[ImageFile]
    text_bytes: int
    """UTF-8 bytes that its labels stand for; 0 where something was cut off, or where it is unknown."""
    is_cut: bool


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
    """What does not fit into it is cut off, never within an image; None: nothing is."""

    def __len__(self) -> int:
        assert isinstance(self.records, Records)
        return len(self.records)

    def measure(self, number: int) -> Measured:
        """Returns a document by the headers of its images; raises as `measure_record`."""
        return self.measure_record(self.record(number))

    def record(self, number: int) -> Record:
        """Returns a record by its number."""
        assert isinstance(self.records, Records)
        return self.records[number]

    def measure_record(self, record: Record) -> Measured:
        """Returns the document of a record by the headers of its images.

        Raises:
            JobError: the record is not as the job says.
            BrokenImage: the header of an image cannot be read.
        """
        parts = self._parts(record)
        sized = [part if isinstance(part, Tokens) else self.processor.grids(size_of(part)) for part in parts]
        kept = sized if self.room is None else list(self._cut(sized, self.room))
        images = [part for part in parts if not isinstance(part, Tokens)]
        images = images[: sum(not isinstance(part, Tokens) for part in kept)]
        single: list[Tokens | Grid] = []
        for part in kept:
            single.extend([part] if isinstance(part, Tokens) else part)
        document = Document.of(single, {part: self.seen.positions(part) for part in single if isinstance(part, Grid)})
        is_cut = len(document.ids) < sum(map(self._length, sized))
        text_bytes = 0 if is_cut else sum(part.text_bytes for part in sized if isinstance(part, Tokens))
        return Measured(document, images, text_bytes, is_cut)

    def read(self, number: int) -> tuple[Document, list[np.ndarray]]:
        """Returns a document and the patches of its images; raises as `measure`."""
        measured = self.measure(number)
        return measured.document, self.patches(measured)

    def patches(self, measured: Measured) -> list[np.ndarray]:
        """Returns the (patches, V) uint8 of each image of a document; raises `BrokenImage` if one cannot be decoded."""
        return [self.processor.patches(decode(image)) for image in measured.images]

    def key(self) -> list[object]:
        """Returns all that documents depend on, but for the contents of image files."""
        around = self.tokenizer.end_of_text, *begin_of_text(self.tokenizer)
        tokenizer = [self.tokenizer.fingerprint(), *around]
        positions = [repr(self.seen.adapter), repr(self.seen.fusion)]
        room = list(self.room) if self.room else None
        assert isinstance(self.records, Records)
        return [self.records.identity(), self.layout.layout_key(), tokenizer, self.processor.key(), positions, room]

    def _parts(self, record: Record) -> list[Part]:
        parts, begin = list(self.layout.parts(record, self.records, self.tokenizer)), begin_of_text(self.tokenizer)
        start = parts[0].ids[: len(begin)] if parts and isinstance(parts[0], Tokens) else ()
        if list(start) != begin:  # a chat's template writes it itself
            parts = [Tokens(begin, False), *parts]
        runs = [part for part in parts if isinstance(part, Tokens)]
        return [*parts, Tokens([self.tokenizer.end_of_text], bool(runs) and runs[-1].learned)]

    def _length(self, part: Tokens | Grids) -> int:
        return len(part.ids) if isinstance(part, Tokens) else sum(map(self.seen.positions, part))

    def _cut(self, parts: Iterable[Tokens | Grids], room: Needs) -> Iterator[Tokens | Grids]:
        """Yields the parts that fit, the last of them maybe shortened. An image has all of its tiles or is left out."""
        entries, patches, images = room.positions + 1, room.patches, room.images  # the last entry is only a label
        for part in parts:
            length = self._length(part)
            if isinstance(part, Tokens):
                yield part._replace(ids=part.ids[:entries])
            else:
                patches, images = patches - sum(grid.patches for grid in part), images - len(part)
                if length >= entries or patches < 0 or images < 0:
                    return
                yield part
            entries -= length
            if entries <= 0:
                return
