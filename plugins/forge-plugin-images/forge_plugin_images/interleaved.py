"""Dataset `interleaved`: documents of texts and images in any order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from attrs import frozen

from forge_plugin_images.source import ImageDataset

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_plugin_images.content import Picture
    from forge_plugin_images.documents import Part
    from forge_plugin_images.records import Record
    from forge_plugin_images.visuals import VisualSource


@frozen(kw_only=True)
class Interleaved(ImageDataset):
    """Documents of texts and images in their order, such as web pages. All tokens are learned, images are not."""

    content: str = "content"
    """The key of a record with its content: a text with `<image>` where an image stands, or a list of texts and images
    (`{"type": "image", "image": "1.jpg"}`, or null for the next one that is listed)."""
    images: str = "images"
    """The key with the images of places that name none, in order."""

    def documents(self) -> Iterator[str]:
        """Yields the texts of documents that are not held out."""
        for record in self.training_records():
            yield from (piece for piece in self._pieces(record) if isinstance(piece, str))

    def parts(self, record: Record, visuals: VisualSource, tokenizer: Tokenizer) -> Iterator[Part]:
        from forge_plugin_images.rows import Tokens

        for piece in self._pieces(record):
            if isinstance(piece, str):
                yield Tokens(tokenizer.encode(piece), True, len(piece.encode()))
            else:
                yield visuals.image(record, piece.value)

    def columns(self) -> Mapping[str, str]:
        return {"content": self.content, "images": self.images}

    def layout_key(self) -> list[object]:
        return ["interleaved", self.content, self.images]

    def _pieces(self, record: Record) -> Iterator[str | Picture]:
        from forge_plugin_images.content import ListedImages, pieces_of

        listed = ListedImages(record, self.images)
        yield from pieces_of(record, record.value(self.content, "content"), listed)
        listed.check_all_taken()
