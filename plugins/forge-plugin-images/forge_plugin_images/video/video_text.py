"""Datasets `video_text` and `video_text_stream`: videos with captions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import frozen

from forge_core.contracts.components import default_type
from forge_core.contracts.errors import JobError, Problem
from forge_plugin_images import VideoComponent
from forge_plugin_images.file_dataset import FileDataset
from forge_plugin_images.source import DocumentDataset
from forge_plugin_images.stream_dataset import StreamDataset
from forge_plugin_images.video_kind import Span, span_of

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_images.documents import Part
    from forge_plugin_images.records import Record
    from forge_plugin_images.rows import Tokens
    from forge_plugin_images.visuals import VisualSource


@frozen(kw_only=True, slots=False)
class CaptionedVideos(DocumentDataset):
    """Pairs of a video and a text, or several texts, or texts for parts of the video.

    The last position of the video predicts the text's first token; videos themselves are never labels.
    """

    optional_columns: ClassVar[Collection[str]] = ("start", "end")

    video: VideoComponent = default_type("forge-plugin-images/frames")
    """`[data.sources.video]`: which frames of a clip are shown, and how."""
    clip: str = "video"
    """The key of a record with its clip: a path or the bytes."""
    text: str = "text"
    """The key of a record with its text, or a list of texts that each describe the clip."""
    captions: Literal["all", "first"] = "all"
    """Which of several texts are used: `all`, one after the other behind the clip, each with its own end-of-text, so
    that the clip is encoded once; or `first`, only the first one."""
    prompt: str = ""
    """The key of a record with a text between clip and caption that is not learned, like a question; empty: none."""
    start: str = "start"
    """The key of a record with the second at which the part begins that is shown; a record may lack it."""
    end: str = "end"
    """The key with the second at which it ends, likewise."""
    segments: str = ""
    """The key of a record with parts of the clip, in order: a list of `start`, `end` and `text`. Empty: there are none,
    and the record's `text` describes the clip."""
    segment_format: str = ""
    """How segments are written behind the clip as a whole, such as `{start:.1f} - {end:.1f} s: {text}`, one a line.
    Empty: each segment is shown by itself, followed by its text."""

    def documents(self) -> Iterator[str]:
        """Yields the texts of documents that are not held out."""
        for record in self.training_records():
            yield from (text for _, text in self._segments(record)) if self.segments else self._captions(record)

    def video_component(self) -> VideoComponent:
        """Returns the table `video`, which this dataset always has."""
        return self.video

    def parts(self, record: Record, visuals: VisualSource, tokenizer: Tokenizer) -> Iterator[Part]:
        """Yields the clip, or each of its segments, followed by its prompt and text; texts alone are learned."""
        value = record.value(self.clip, "clip")
        prompt = record.text(self.prompt, "prompt") if self.prompt else ""
        if self.segments and not self.segment_format:
            for span, text in self._segments(record):
                yield visuals.video(record, value, span)
                yield from _texts(tokenizer, prompt, [text])
            return
        span = span_of(record, record.values, self.start, self.end)
        # None leaves the part to the value, which may have times itself.
        yield visuals.video(record, value, span if span != Span() else None)
        texts = [self._written(record)] if self.segments else self._captions(record)
        yield from _texts(tokenizer, prompt, texts)

    def columns(self) -> Mapping[str, str]:
        """Returns `text` or `segments`, of which one is read, and `prompt` only if it is set."""
        names = ["clip", "start", "end", *(["segments"] if self.segments else ["text"])]
        return {name: getattr(self, name) for name in [*names, *(["prompt"] if self.prompt else [])]}

    def layout_key(self) -> list[object]:
        """Without `video`: which frames are shown is in the key of the clips."""
        own = [self.clip, self.text, self.captions, self.prompt, self.start, self.end]
        return ["video_text", *own, self.segments, self.segment_format]

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that `segment_format` is a format that writes the text, too."""
        yield from super().problems(job, layout)
        if self.segment_format and not self.segments:
            yield Problem("segment_format", "it is for segments; name their key in segments, or leave it out")
        if self.segments and self.captions != "all":
            yield Problem("captions", f"{self.captions!r} is for several texts of a clip, and segments have one each")
        try:
            written = self.segment_format.format(start=0.0, end=1.0, text="")
        except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
            hint = "write it like '{start:.1f} - {end:.1f} s: {text}'"
            yield Problem("segment_format", f"{self.segment_format!r} ({type(error).__name__}: {error}); {hint}")
        else:
            if self.segment_format and written == self.segment_format.format(start=0.0, end=1.0, text="a"):
                yield Problem(
                    "segment_format", f"{self.segment_format!r} does not write the text; put {{text}} into it"
                )

    def _captions(self, record: Record) -> Sequence[str]:
        value = record.value(self.text, "text")
        texts = value if isinstance(value, list) else [value]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise JobError(
                f"{record.place}: {self.text!r} holds {str(value)[:60]!r}, which is no text or list of texts"
            )
        return texts if self.captions == "all" else texts[:1]

    def _segments(self, record: Record) -> Iterator[tuple[Span, str]]:
        value = record.value(self.segments, "segments")
        if not isinstance(value, list) or not value or not all(isinstance(part, Mapping) for part in value):
            raise JobError(f"{record.place}: {self.segments!r} holds {str(value)[:60]!r}, which is no list of segments")
        for number, part in enumerate(value):
            span = span_of(record, part)
            if span.end is None or not isinstance(part.get("text"), str):
                keys = ", ".join(map(repr, part)) or "nothing"
                raise JobError(f"{record.place}: segment {number} has {keys}; one has 'start', 'end' and a 'text'")
            yield span, part["text"]

    def _written(self, record: Record) -> str:
        segments = self._segments(record)
        return "\n".join(
            self.segment_format.format(start=span.start, end=span.end, text=text) for span, text in segments
        )


@frozen(kw_only=True)
class VideoText(CaptionedVideos, FileDataset):
    """Pairs of a video and a text, in files."""


@frozen(kw_only=True)
class VideoTextStream(CaptionedVideos, StreamDataset):
    """Pairs of a video and a text, read during training from a Hugging Face dataset."""


def _texts(tokenizer: Tokenizer, prompt: str, texts: Sequence[str]) -> Iterator[Tokens]:
    """Yields texts that are learned, each behind the prompt; between two of them an end-of-text."""
    from forge_plugin_images.rows import Tokens

    for number, text in enumerate(texts):
        if number:
            # Learned, so that the model ends each caption
            yield Tokens([tokenizer.end_of_text])
        if prompt:
            yield Tokens(tokenizer.encode(prompt), False)
        yield Tokens(tokenizer.encode(text), True, len(text.encode()))
