"""Dataset `image_chat`: conversations with images, of which only the answers are learned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from attrs import frozen

from forge_core.contracts.errors import JobError, Problem
from forge_plugin_images.source import ImageDataset

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_images.content import Picture
    from forge_plugin_images.documents import Part
    from forge_plugin_images.records import Record
    from forge_plugin_images.rows import Tokens
    from forge_plugin_images.visuals import VisualSource

PLACE = "\ufdd2"
"""Stands for an image in a conversation that a template of texts alone writes: Unicode reserves it internally."""
ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}
"""Other names of roles, as in ShareGPT's and LLaVA's files."""
NO_TEMPLATE = 'chats need a tokenizer with a template; set [data.tokenizer] type = "auto" (forge-plugin-huggingface)'


@frozen(kw_only=True)
class ImageChat(ImageDataset):
    """Conversations with images, written by the tokenizer's chat template; only the assistant's turns are learned."""

    messages: str = "messages"
    """The key of a record with its messages: `role` and `content`, or `from` and `value` as in LLaVA's files. A content
    is a text with `<image>` where an image stands, or a list of texts and images."""
    images: str = "images"
    """The key with the images of places that name none, in order."""
    image_token: str = ""
    """The text that the template writes for an image, such as `<|image_pad|>`; the model's features take its place.
    Empty: the template knows texts only, and an image stands where the message has it."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        yield from super().problems(job, layout)
        if job.data.tokenizer is not None and not getattr(job.data.tokenizer, "chats", False):
            yield Problem("messages", NO_TEMPLATE)

    def parts(self, record: Record, visuals: VisualSource, tokenizer: Tokenizer) -> Iterator[Part]:
        from forge_plugin_huggingface.chat import PartedChatTokenizer

        if not isinstance(tokenizer, PartedChatTokenizer):
            raise JobError([Problem("messages", NO_TEMPLATE)])
        messages, pictures = self._conversation(record)
        try:
            parts = tokenizer.chat_parts(messages, self.image_token or PLACE)
        except JobError as error:
            raise JobError(f"{record.place}: {error}") from error
        if len(parts) != len(pictures) + 1:
            written = f"the chat template writes {self.image_token or 'their place'!r} {len(parts) - 1} times"
            hint = "set image_token to what it writes for an image; empty for a template that knows texts only"
            raise JobError(f"{record.place}: it has {len(pictures)} images, and {written}; {hint}")
        for number, part in enumerate(parts):
            if number:
                yield visuals.image(record, pictures[number - 1].value)
            yield from runs(part.ids, part.learned)

    def columns(self) -> Mapping[str, str]:
        return {"messages": self.messages, "images": self.images}

    def layout_key(self) -> list[object]:
        return ["image_chat", self.messages, self.images, self.image_token]

    def _conversation(self, record: Record) -> tuple[list[dict[str, Any]], list[Picture]]:
        """Returns messages as the template reads them, and the images in order."""
        from forge_plugin_images.content import ListedImages, pieces_of

        listed, messages, pictures = ListedImages(record, self.images), [], list[Any]()
        for message in checked_messages(record, record.value(self.messages, "messages")):
            pieces = list(pieces_of(record, message["content"], listed))
            pictures += [piece for piece in pieces if not isinstance(piece, str)]
            messages.append({**message, "content": self._content(pieces)})
        listed.check_all_taken()
        return messages, pictures

    def _content(self, pieces: Sequence[str | Picture]) -> Any:
        if not self.image_token:
            return "".join(piece if isinstance(piece, str) else PLACE for piece in pieces)
        return [{"type": "text", "text": piece} if isinstance(piece, str) else {"type": "image"} for piece in pieces]


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

    bounds = [0, *(np.flatnonzero(np.diff(learned)) + 1), len(ids)]
    for start, end in pairwise(bounds):
        if end > start:
            yield Tokens(ids[start:end], bool(learned[start]))
