"""Datasets `image_text` and `image_text_stream`: images with captions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from attrs import frozen

from forge_plugin_images.file_dataset import FileDataset
from forge_plugin_images.image_keys import HasImages
from forge_plugin_images.stream_dataset import StreamDataset

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_plugin_images.documents import Part
    from forge_plugin_images.records import Record
    from forge_plugin_images.visuals import VisualSource


@frozen(kw_only=True, slots=False)
class CaptionedImages(HasImages):
    """Pairs of an image, or several, and a text.

    The last position of the image predicts the text's first token; images themselves are never labels.
    """

    image: str = "image"
    """The key of a record with its image: a path or the bytes, or a list of them."""
    text: str = "text"
    """The key of a record with its text."""
    prompt: str = ""
    """The key of a record with a text between image and caption that is not learned, like a question; empty: none."""
    caption: Literal["after", "before"] = "after"
    """Where the text stands: after the image, which is described, or before it."""

    def documents(self) -> Iterator[str]:
        """Yields the texts of documents that are not held out."""
        return (record.text(self.text, "text") for record in self.training_records())

    def parts(self, record: Record, visuals: VisualSource, tokenizer: Tokenizer) -> Iterator[Part]:
        """Yields the images of the record, the prompt if any, and the caption, which alone is learned."""
        from forge_plugin_images.rows import Tokens

        value, text = record.value(self.image, "image"), record.text(self.text, "text")
        images = [visuals.image(record, one) for one in (value if isinstance(value, list) else [value])]
        caption = Tokens(tokenizer.encode(text), True, len(text.encode()))
        if self.caption == "before":
            yield caption
        yield from images
        if self.prompt and (prompt := record.text(self.prompt, "prompt")):
            yield Tokens(tokenizer.encode(prompt), False)
        if self.caption == "after":
            yield caption

    def columns(self) -> Mapping[str, str]:
        """Returns `prompt` only if it is set: empty, it names no column."""
        return {"image": self.image, "text": self.text} | ({"prompt": self.prompt} if self.prompt else {})

    def layout_key(self) -> list[object]:
        """Includes the order of image and caption; how images are resized is in the processor's key."""
        return ["image_text", self.image, self.text, self.prompt, self.caption]


@frozen(kw_only=True)
class ImageText(CaptionedImages, FileDataset):
    """Pairs of an image, or several, and a text, in files."""


@frozen(kw_only=True)
class ImageTextStream(CaptionedImages, StreamDataset):
    """Pairs of an image, or several, and a text, read during training from a Hugging Face dataset."""
