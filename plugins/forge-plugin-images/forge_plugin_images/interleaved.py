"""Datasets `interleaved` and `interleaved_stream`: documents of texts, images and videos in any order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from forge_plugin_images.file_dataset import FileDataset
from forge_plugin_images.image_keys import HasImages
from forge_plugin_images.stream_dataset import StreamDataset
from forge_plugin_images.video_kind import VideoComponent

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_plugin_images.content import Shown
    from forge_plugin_images.documents import Part
    from forge_plugin_images.records import Record
    from forge_plugin_images.visuals import VisualSource


@frozen(kw_only=True, slots=False)
class MixedDocuments(HasImages):
    """Documents of texts, images and videos in their order, such as web pages.

    All tokens are learned, but for those that `[data.sources.video]` writes; images and videos are not.
    """

    optional_columns: ClassVar[Collection[str]] = ("images", "videos")

    content: str = "content"
    """The key of a record with its content: a text with `<image>` where an image stands and `<video>` where a video
    does, or a list of texts, images and videos (`{"type": "image", "image": "1.jpg"}`, or null for the next one that is
    listed; `{"type": "video", "video": "1.mp4", "start": 2.5}`)."""
    images: str = "images"
    """The key with the images of places that name none, in order."""
    videos: str = "videos"
    """The key with the videos of places that name none, in order."""
    video: VideoComponent | None = None
    """`[data.sources.video]`: which frames of a video are shown, and how; for documents with videos."""

    def documents(self) -> Iterator[str]:
        """Yields the texts of documents that are not held out."""
        for record in self.training_records():
            yield from (piece for piece in self._pieces(record) if isinstance(piece, str))

    def parts(self, record: Record, visuals: VisualSource, tokenizer: Tokenizer) -> Iterator[Part]:
        """Yields the texts of the content, all learned, and its visuals, in their order."""
        from forge_plugin_images.rows import Tokens

        for piece in self._pieces(record):
            if isinstance(piece, str):
                yield Tokens(tokenizer.encode(piece), True, len(piece.encode()))
            else:
                yield piece.visual(record, visuals)

    def video_component(self) -> VideoComponent | None:
        """Returns the table `video`; None: a video in a document is an error, and `<video>` is text."""
        return self.video

    def columns(self) -> Mapping[str, str]:
        """Returns `videos` only with a table `video`: a stream otherwise does not read that column."""
        own = {"content": self.content, "images": self.images}
        return own if self.video is None else {**own, "videos": self.videos}

    def layout_key(self) -> list[object]:
        """Without videos their key is left out, as it then changes no document."""
        return ["interleaved", self.content, self.images, *([] if self.video is None else [self.videos])]

    def _pieces(self, record: Record) -> Iterator[str | Shown]:
        from forge_plugin_images.content import Listed, pieces_of

        listed = Listed(record, self.images, self.videos, has_videos=self.video is not None)
        yield from pieces_of(record, record.value(self.content, "content"), listed)
        # Only now: the content must have been read to its end
        listed.check_all_taken()


@frozen(kw_only=True)
class Interleaved(MixedDocuments, FileDataset):
    """Documents of texts, images and videos in their order, in files."""


@frozen(kw_only=True)
class InterleavedStream(MixedDocuments, StreamDataset):
    """Documents of texts, images and videos in their order, read during training from a Hugging Face dataset."""
