"""Datasets `image_chat` and `image_chat_stream`: conversations with images and videos."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

from forge_core.contracts.errors import JobError, Problem
from forge_plugin_images.file_dataset import FileDataset
from forge_plugin_images.image_file import BrokenImage
from forge_plugin_images.image_keys import HasImages
from forge_plugin_images.stream_dataset import StreamDataset
from forge_plugin_images.video_kind import VideoComponent

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_images.content import Kind, Shown
    from forge_plugin_images.documents import Part
    from forge_plugin_images.records import Record
    from forge_plugin_images.rows import Tokens
    from forge_plugin_images.visuals import VisualSource

PLACE = "\ufdd2"
"""Stands for an image or video in a conversation that a template of texts alone writes: Unicode reserves it."""
ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}
"""Other names of roles, as in ShareGPT's and LLaVA's files."""
NO_TEMPLATE = 'chats need a tokenizer with a template; set [data.tokenizer] type = "auto" (forge-plugin-huggingface)'


@frozen(kw_only=True, slots=False)
class ImageConversations(HasImages):
    """Conversations with images and videos, written by the tokenizer's chat template.

    Only the assistant's turns are learned.
    """

    optional_columns: ClassVar[Collection[str]] = ("images", "videos")

    messages: str = "messages"
    """The key of a record with its messages: `role` and `content`, or `from` and `value` as in LLaVA's files. A content
    is a text with `<image>` where an image stands and `<video>` where a video does, or a list of texts, images and
    videos."""
    images: str = "images"
    """The key with the images of places that name none, in order."""
    videos: str = "videos"
    """The key with the videos of places that name none, in order."""
    image_token: str = ""
    """The text that the template writes for an image, such as `<|image_pad|>`; the model's features take its place.
    Empty: the template supports text only, and an image stands where the message has it."""
    video_token: str = ""
    """Likewise for a video, such as `<|video_pad|>`. For Qwen3-VL, whose frames have each its own marks around, it is
    `<|vision_start|><|video_pad|><|vision_end|>`."""
    video: VideoComponent | None = None
    """`[data.sources.video]`: which frames of a video are shown, and how; for conversations with videos."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that the tokenizer has a chat template, and that the tokens of images and videos differ."""
        yield from super().problems(job, layout)
        if job.data.tokenizer is not None and not getattr(job.data.tokenizer, "chats", False):
            yield Problem("messages", NO_TEMPLATE)
        if self.video_token and self.video is None:
            yield Problem("video_token", "it is for videos; add [data.sources.video], or leave it out")
        if self.video_token and self.video_token == self.image_token:
            yield Problem("video_token", f"{self.video_token!r} is image_token, too; a template writes one for each")

    def video_component(self) -> VideoComponent | None:
        """Returns the table `video`; None: videos in a conversation are an error, and `<video>` is text."""
        return self.video

    def parts(self, record: Record, visuals: VisualSource, tokenizer: Tokenizer) -> Iterator[Part]:
        """Yields what the chat template writes, with each visual where its mark stands; assistant turns are learned.

        Raises:
            JobError: the tokenizer has no template, or the template does not write a mark for each visual, in order.
            BrokenImage: a text contains a mark itself.
        """
        from forge_plugin_huggingface.chat import PartedChatTokenizer

        if not isinstance(tokenizer, PartedChatTokenizer):
            raise JobError([Problem("messages", NO_TEMPLATE)])
        messages, shown = self._conversation(record)
        try:
            # One call for the conversation: a template may write a turn differently by its neighbours.
            pieces = tokenizer.chat_pieces(messages, sorted(set(self._marks.values())))
        except JobError as error:
            raise JobError(f"{record.place}: {error}") from error
        self._check_marks(record, [mark for _, mark in pieces[:-1]], shown)
        for number, (part, _) in enumerate(pieces):
            if number:
                yield shown[number - 1].visual(record, visuals)
            yield from runs(part.ids, part.learned)

    @property
    def _marks(self) -> Mapping[Kind, str]:
        """What stands for an image and for a video in the text of a conversation."""
        return {"image": self.image_token or PLACE, "video": self.video_token or PLACE}

    def _check_marks(self, record: Record, marks: Sequence[str], shown: Sequence[Shown]) -> None:
        """Raise `JobError` if the marks that the template writes do not match the shown images and videos, in order."""
        own = self._marks
        for kind in own:
            expected, written = sum(one.kind == kind for one in shown), sum(mark == own[kind] for mark in marks)
            # One mark for both: only their total can be compared
            if own["image"] == own["video"]:
                expected = len(shown)
            if expected != written:
                name = own[kind] if own[kind] != PLACE else "their place"
                message = f"it has {expected} {kind}s, and the chat template writes {name!r} {written} times"
                hint = f"set {kind}_token to what it writes for {'an image' if kind == 'image' else 'a video'}"
                raise JobError(f"{record.place}: {message}; {hint}; leave it empty for a text-only template")
        if list(marks) != [own[one.kind] for one in shown]:
            message = "the chat template writes its images and videos in another order than its messages have them"
            raise JobError(f"{record.place}: {message}; put all images of a message before its videos, or take another")

    def columns(self) -> Mapping[str, str]:
        """Returns `videos` only with a table `video`: a stream otherwise does not read that column."""
        own = {"messages": self.messages, "images": self.images}
        return own if self.video is None else {**own, "videos": self.videos}

    def layout_key(self) -> list[object]:
        """Without videos their keys are left out, as they then change no document."""
        own: list[object] = ["image_chat", self.messages, self.images, self.image_token]
        return own if self.video is None else [*own, self.videos, self.video_token]

    def _conversation(self, record: Record) -> tuple[list[dict[str, Any]], list[Shown]]:
        """Returns messages as the template reads them, and the images and videos in order."""
        from forge_plugin_images.content import Listed, pieces_of

        listed = Listed(record, self.images, self.videos, has_videos=self.video is not None)
        messages, shown = [], list[Any]()
        for message in checked_messages(record, record.value(self.messages, "messages")):
            pieces = list(pieces_of(record, message["content"], listed))
            shown += [piece for piece in pieces if not isinstance(piece, str)]
            self._check_texts(record, [piece for piece in pieces if isinstance(piece, str)])
            messages.append({**message, "content": self._content(pieces)})
        listed.check_all_taken()
        return messages, shown

    def _check_texts(self, record: Record, texts: Sequence[str]) -> None:
        """Raise `BrokenImage` for a text that has what the template writes for an image or a video."""
        for kind, mark in self._marks.items():
            if any(mark in text for text in texts):
                message = f"a text of {record.place} has {mark!r}, which stands for a shown {kind} ({kind}_token)"
                hint = 'take it out of the text, or leave such documents out: unreadable = "skip"'
                # No `JobError`, which would end the run with `unreadable = "skip"` too
                raise BrokenImage(f"{message}; {hint}")

    def _content(self, pieces: Sequence[str | Shown]) -> Any:
        if not self.image_token and not self.video_token:
            # A text and not a list of entries, as a text-only template expects it
            return "".join(piece if isinstance(piece, str) else PLACE for piece in pieces)
        return [{"type": "text", "text": piece} if isinstance(piece, str) else self._entry(piece) for piece in pieces]

    def _entry(self, piece: Shown) -> Mapping[str, str]:
        """Returns an image or a video as the template reads it: by itself, or as a text that stands for it."""
        token = self.image_token if piece.kind == "image" else self.video_token
        return {"type": piece.kind} if token else {"type": "text", "text": PLACE}


@frozen(kw_only=True)
class ImageChat(ImageConversations, FileDataset):
    """Conversations with images and videos, in files."""


@frozen(kw_only=True)
class ImageChatStream(ImageConversations, StreamDataset):
    """Conversations with images and videos, read during training from a Hugging Face dataset."""


def checked_messages(record: Record, value: Any) -> list[dict[str, Any]]:
    """Returns messages with `role` and `content`; raises `JobError` if there are none."""
    if not isinstance(value, list) or not value or not all(isinstance(message, Mapping) for message in value):
        raise JobError(f"{record.place}: {str(value)[:60]!r} is not a list of messages")
    messages = []
    for number, message in enumerate(value):
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if not isinstance(role, str) or content is None:
            keys = ", ".join(map(repr, message)) or "nothing"
            raise JobError(f"{record.place}: message {number} has {keys}; a message has 'role' and 'content'")
        messages.append({"role": ROLES.get(role, role), "content": content})
    return messages


def runs(ids: Any, learned: Any) -> Iterator[Tokens]:
    """Yields tokens (n,) int64 as runs in which all are learned (n,) bool, or none."""
    import numpy as np

    from forge_plugin_images.rows import Tokens

    # Where `learned` changes
    bounds = [0, *(np.flatnonzero(np.diff(learned)) + 1), len(ids)]
    for start, end in pairwise(bounds):
        if end > start:
            yield Tokens(ids[start:end], bool(learned[start]))
